"""Models that are away are loaded shortly before they are expected to be asked again (:mod:`prism.policy.prewarm`).

Into free memory where nobody contested it lately, or in the place of idle models that are expected much later. Once in
an idle time at the most: what left again without a request was a wrong guess.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Final

from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.policy.prewarm import (
    CHANCE_TO_EVICT,
    LEAST_CHANCE,
    TIMES_LIKELIER,
    TOGETHER_S,
    Companions,
    chance_of_return,
    due_after_s,
    window_s,
)
from prism.scheduler.books import Books
from prism.scheduler.decisions import Room, StartInstance
from prism.scheduler.evictions import Eviction, Evictions
from prism.scheduler.places import Places
from prism.scheduler.records import InstanceRecord, ModelRecord, PrewarmCounts
from prism.scheduler.survey import Survey
from prism.scheduler.victims import Pressing

_SETTLED_S: Final = 20.0
"""Nothing is loaded ahead where somebody had to leave, or lacked memory, so short a time ago."""
_AGAIN_S: Final = 1.0
"""A model that found no place is looked at again then."""
_LOOKS: Final = 4
"""Most models looked at in one event; the others' turn comes after _PAUSE_S."""
_PAUSE_S: Final = 0.05
_RETURN_GAP_S: Final = 5.0
"""A request after so long an idle time is a return, for models that are used together."""


class Prewarming:
    """Owns who is looked at when, and which instances were loaded ahead and have had no request yet."""

    def __init__(self, books: Books, places: Places, evictions: Evictions, counts: PrewarmCounts) -> None:
        self._books, self._places, self._evictions = books, places, evictions
        self._counts = counts
        self._enabled = books.settings.prewarm and books.settings.global_scheduler
        self._looks: list[tuple[float, ModelName, float, float]] = []
        """When, whom, the chance that its company tells (0: none), until when; the next one first."""
        self._ahead: dict[ModelName, InstanceKey] = {}
        self._guessed_s: dict[ModelName, float] = {}
        """Last request of a model as of when it was loaded ahead: nobody is twice in one idle time."""
        self._pause_until_s = float("-inf")
        self._companions = Companions()

    @property
    def next_s(self) -> float:
        """When :meth:`on_time` has something to do."""
        return max(self._looks[0][0], self._pause_until_s) if self._looks else float("inf")

    def on_gone(self, models: Iterable[ModelRecord], now_s: float) -> None:
        """Instances of ``models`` are gone."""
        for model in models:
            if model.instances:
                continue
            if self._ahead.pop(model.name, None) is not None:
                self._counts.wasted += 1
            if self._enabled and model.made_room:
                self._look_later(model, now_s)

    def on_arrivals(self, model: ModelRecord, idle_s: float, now_s: float) -> None:
        """Requests for ``model`` came, after an idle time of ``idle_s`` (0: it was not idle)."""
        if (key := self._ahead.pop(model.name, None)) is not None and any(i.key == key for i in model.instances):
            self._counts.used += 1
            self._counts.saved_s += self._books.activation_s(model)
        if not self._enabled or idle_s < _RETURN_GAP_S:
            return
        self._companions.on_return(model.name, now_s)
        for name, chance in self._companions.after(model.name):
            if name in self._books.models:
                # After the one that was asked: it is to have room first.
                heapq.heappush(self._looks, (now_s + _PAUSE_S, ModelName(name), chance, now_s + TOGETHER_S))

    def on_time(self, now_s: float) -> Iterator[StartInstance]:
        """Load those whose time has come, as far as there is place for them."""
        survey = Survey()  # what one finds holds for the next, until something starts
        for _ in range(_LOOKS):
            if self.next_s > now_s:
                return
            _, name, told, until_s = heapq.heappop(self._looks)
            model = self._books.models.get(name)
            if model is None or not self._may_come(model, now_s):
                continue
            start = self._start(model, max(told, self._chance(model, now_s)), told > 0.0, survey, now_s)
            if start is not None:
                yield start
                self._note_start(model)
                survey = Survey()
            elif now_s + _AGAIN_S < until_s:
                heapq.heappush(self._looks, (now_s + _AGAIN_S, name, told, until_s))
            elif not told:  # whose company was asked is still looked at by its own rhythm
                self._look_later(model, now_s + _AGAIN_S)
        self._pause_until_s = now_s + _PAUSE_S

    def _may_come(self, model: ModelRecord, now_s: float) -> bool:
        away = model.made_room and not model.removed and not model.instances and not model.waiting
        return away and now_s >= model.retry_at_s and self._guessed_s.get(model.name) != model.last_arrival_s

    def _note_start(self, model: ModelRecord) -> None:
        self._ahead[model.name] = model.instances[-1].key
        self._guessed_s[model.name] = model.last_arrival_s or 0.0

    def _look_later(self, model: ModelRecord, from_s: float) -> None:
        since_s = _idle_since_s(model)
        if since_s is None or self._guessed_s.get(model.name) == model.last_arrival_s:
            return
        within_s = window_s(self._books.activation_s(model))
        due_s = since_s + due_after_s(from_s - since_s, within_s, model.idle, self._books.rates.pool_idle)
        if due_s < float("inf"):
            heapq.heappush(self._looks, (due_s, model.name, 0.0, due_s))

    def _chance(self, model: ModelRecord, now_s: float, within_s: float | None = None) -> float:
        """That the model has a request within its window, or within ``within_s``."""
        since_s = _idle_since_s(model)
        if since_s is None:
            return 0.0
        within_s = within_s or window_s(self._books.activation_s(model))
        return chance_of_return(now_s - since_s, within_s, model.idle, self._books.rates.pool_idle)

    def _start(
        self, model: ModelRecord, chance: float, told: bool, survey: Survey, now_s: float
    ) -> StartInstance | None:
        """Where the model is loaded ahead, if there is a place for it.

        1. In free memory, beside what those that are there needed lately, where nothing is loaded and nobody had to
           leave lately; a companion of one that was just asked (``told``) also where that made room, if it usually
           comes.
        2. Where idle models leave that are TIMES_LIKELIER less likely to be asked in the same time.
        """
        if chance < LEAST_CHANCE or not self._books.fleet.devices:
            return None
        reason = because(ReasonCode.PREWARM, chance=chance)
        if (free := self._free(model, told and chance >= CHANCE_TO_EVICT, now_s)) is not None:  # 1
            return StartInstance(model, Room.on(free, (), self._cap_bytes(model, free, now_s)), reason)
        if chance <= CHANCE_TO_EVICT:
            return None
        evictions = self._evictions.find_cheapest(model, Pressing.CAN_WAIT, now_s, survey)
        if evictions is None or not all(self._may_leave(e, model, chance, now_s) for e in evictions):
            return None
        devices = tuple(e.device for e in evictions)  # 2
        leave = self._evictions.reasons(evictions, model, now_s)
        return StartInstance(model, Room.on(devices, leave, self._cap_bytes(model, devices, now_s)), reason)

    def _free(self, model: ModelRecord, anywhere: bool, now_s: float) -> tuple[DeviceId, ...] | None:
        if (quiet := next(self._places.quiet(model, 0, _SETTLED_S, now_s), None)) is not None or not anywhere:
            return quiet
        found = self._places.find_free(model, now_s)
        return None if found is None else found[0]

    def _cap_bytes(self, model: ModelRecord, devices: tuple[DeviceId, ...], now_s: float) -> int | None:
        return self._places.kv_cap_bytes(model, devices, now_s)

    def _may_leave(self, eviction: Eviction, model: ModelRecord, chance: float, now_s: float) -> bool:
        device = self._books.fleet.devices[eviction.device]
        if device.contested_s >= now_s - _SETTLED_S:
            return False
        within_s = window_s(self._books.activation_s(model))
        return all(self._chance_of(v, within_s, now_s) * TIMES_LIKELIER <= chance for v in eviction.victims)

    def _chance_of(self, victim: InstanceRecord, within_s: float, now_s: float) -> float:
        model = self._books.models[victim.model]
        return 0.0 if model.is_spare(victim) else self._chance(model, now_s, within_s)


def _idle_since_s(model: ModelRecord) -> float | None:
    return model.idle_since_s if model.idle_since_s is not None else model.last_arrival_s
