"""Which models a fleet that cannot serve everybody does not serve for the time being (:mod:`prism.policy.triage`).

A model that is turned away gives way to any other that would be late without its room. It is loaded where it drives
out nobody but models that have been idle for long, if its requests can be in time then, and otherwise in turns. With
``overload: turns`` models are turned away only where memory cannot hold all that are asked, and whoever has waited for
nearly its bound has its turn, so that no request is refused for want of one. With ``most_served`` also where time alone
is short, and all turns together take a tenth of the fleet's time: what waits beyond its bound is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode, because
from prism.core.settings import Overload
from prism.core.specs import DeviceSpec
from prism.core.views import InstanceState
from prism.policy.device_time import Batch, alone_s, bandwidth_share, room_within
from prism.policy.profiles import rates_on
from prism.policy.triage import Applicant, FleetRoom, turned_away
from prism.scheduler.books import Books
from prism.scheduler.decisions import StopInstance
from prism.scheduler.records import InstanceRecord, ModelRecord

_EVERY_S: Final = 1.0
_TROUBLED: Final = 0.05
"""Part of the requests whose models are in trouble from which on the fleet is overloaded."""
_SLOWED: Final = 0.75
"""Part of the objective of a token's time that neighbours may take a model's steps to."""
_LINGERS_S: Final = 2.0
"""A model is there for so long around each of its requests."""
_USABLE: Final = 0.95
"""Part of the memory that models can fill: it is dealt in whole models."""
_TURN_AT: Final = 0.9
"""Part of `max_wait` after which it is the turn of a model that is turned away. Its requests are late by then in any
case, and each turn costs requests of others: the later, the fewer."""
_TURN_LEAVES_S: Final = 4.0
"""What a turn leaves of a short `max_wait` at least, to load in: what waits for longer is refused."""
_TURN_S: Final = 10.0
"""Longest turn of a model that is turned away, while its requests wait."""
_TURNS_SHARE: Final = 0.1
"""Part of the fleet's time that all these turns together may take."""
_SAVED_UP_S: Final = 10.0
"""So much of that share may be saved up."""
_PROMPT_TOKENS: Final = 500.0
_ANSWER_TOKENS: Final = 200.0
"""Where nobody has told."""


class Triage:
    """Owns who is turned away (``books.turned_away``)."""

    def __init__(self, books: Books) -> None:
        self._books = books
        settings = books.settings
        self.enabled = settings.overload is not Overload.EVERYBODY and settings.global_scheduler
        self._most_served = settings.overload is Overload.MOST_SERVED
        self._prompts = dict(books.settings.expected_prompt_tokens)
        self._answers = dict(books.settings.expected_output_tokens)
        self._asked: dict[ModelName, None] = {}
        """Models that requests came for lately: those that nobody asks for cost nothing."""
        self._looked_s = float("-inf")
        self._spent_s = 0.0
        """Device time that turns have taken beyond their share; negative: saved up."""

    @property
    def next_s(self) -> float:
        """When it looks again; never where nobody is turned away."""
        return self._looked_s + _EVERY_S if self.enabled else float("inf")

    def on_time(self, now_s: float) -> Iterator[StopInstance]:
        """Looks once a second; turns that are over end, and what drains for them is carried over where others wait for
        its memory."""
        if now_s < self.next_s:
            return
        self._spend(now_s)
        self._looked_s = now_s
        self._books.turned_away = self._look(now_s)
        for name in sorted(self._books.turned_away):
            for instance in list(self._books.models[name].instances):
                if self._turn_is_over(instance, now_s):
                    yield StopInstance(instance, because(ReasonCode.KV_PRESSURE, turned_away=1))
                elif self._is_in_the_way(instance):
                    yield StopInstance(instance, because(ReasonCode.KV_PRESSURE, turned_away=1), carry=True)

    def on_arrivals(self, model: ModelRecord) -> None:
        """Requests for the model came."""
        if self.enabled:
            self._asked[model.name] = None

    def waits_its_turn(self, model: ModelRecord, now_s: float) -> bool:
        """The model is turned away, was not asked for by an operator, and it is not its turn: it has not waited for
        long enough yet, or its like have had their share of the fleet's time, where that is bounded."""
        if model.name not in self._books.turned_away or model.want is not None:
            return False
        bound_s = model.spec.max_wait_s
        turn_s = max(bound_s / 2, min(_TURN_AT * bound_s, bound_s - _TURN_LEAVES_S))
        if now_s < model.waiting_since_s + turn_s:
            return True
        return self._most_served and self._spent_s > 0.0

    def could_be_in_time(self, model: ModelRecord) -> bool:
        """Loading the model leaves as long again for a first token: room that nobody misses is well used by it."""
        return self._books.activation_s(model) <= 0.5 * model.spec.slo_ttft_s

    # --- turns ---

    def _spend(self, now_s: float) -> None:
        devices = len(self._books.fleet.devices)
        passed_s = min(1.5 * _EVERY_S, now_s - self._looked_s)
        used = sum(len(i.shards) for i in self._books.loaded.values() if i.model in self._books.turned_away)
        spent_s = self._spent_s + passed_s * (used - _TURNS_SHARE * devices)
        self._spent_s = max(-_SAVED_UP_S * _TURNS_SHARE * devices, spent_s)

    def _turn_is_over(self, instance: InstanceRecord, now_s: float) -> bool:
        if instance.state is not InstanceState.READY:
            return False
        there_s = now_s - instance.since_s
        return there_s >= self._books.settings.min_residency_s and (not instance.waiting or there_s >= _TURN_S)

    def _is_in_the_way(self, instance: InstanceRecord) -> bool:
        """It drains, and more requests wait for memory beside it than it still runs."""
        if instance.state is not InstanceState.DRAINING or instance.carried:
            return False
        devices = self._books.fleet.devices
        there = [devices[d] for d in instance.shards if d in devices]
        return sum(i.waiting for d in there if d.memory_short_s > 0.0 for i in d.instances.values()) > instance.running

    # --- who ---

    def _look(self, now_s: float) -> frozenset[ModelName]:
        books, asked_per_s, troubled_per_s = self._books, 0.0, 0.0
        asked: list[tuple[ModelRecord, float]] = []
        for name in list(self._asked):
            model = books.models.get(name)
            rate_per_s = 0.0 if model is None else books.rates.lately(model, now_s)
            if model is None or model.removed or (rate_per_s <= 0.0 and not model.waiting):
                del self._asked[name]
                continue
            if model.pinned:
                continue
            asked_per_s += rate_per_s
            troubled_per_s += rate_per_s * self._in_trouble(model, now_s)
            asked.append((model, rate_per_s))
        usable = [d.spec for d in books.fleet.devices.values() if not d.draining]
        if not usable or troubled_per_s <= _TROUBLED * asked_per_s:
            return frozenset()
        room = FleetRoom(float(len(usable)), _USABLE * sum(spec.memory_bytes for spec in usable))
        applicants = [self._applicant(model, rate_per_s, usable[0]) for model, rate_per_s in asked]
        return turned_away(applicants, room, by_time=self._most_served)

    def _in_trouble(self, model: ModelRecord, now_s: float) -> bool:
        """Its requests wait for longer than their objective, or it is turned away."""
        slo_s = model.spec.slo_ttft_s
        late = model.waiting and now_s - model.waiting_since_s > slo_s
        return bool(late or model.name in self._books.turned_away) or any(
            i.waiting and i.waited_s > slo_s for i in model.instances
        )

    def _applicant(self, model: ModelRecord, rate_per_s: float, device: DeviceSpec) -> Applicant:
        """What the model takes, by the model of step times: as many requests run at once as come in the time of an
        answer, in as many instances as keep their tokens within the objective. ``device`` stands for all others."""
        spec, served = model.spec, model.name not in self._books.turned_away
        rates, shard_bytes = rates_on(spec, device.kind), spec.shard_weight_bytes
        answer = self._answers.get(spec.name, _ANSWER_TOKENS)
        kv_tokens = self._prompts.get(spec.name, _PROMPT_TOKENS) + answer / 2
        kv_bytes = kv_tokens * spec.shape.kv_bytes_per_token / spec.tp
        step_s = alone_s(rates, Batch(shard_bytes, 0, 1))
        running = rate_per_s * answer * step_s * max(1.0, _SLOWED * spec.slo_tpot_s / step_s)
        room = room_within(rates, shard_bytes, kv_bytes, spec.slo_tpot_s)
        copies = max(1.0, running / room) if room >= 1.0 else 1.0
        each = running / copies
        batch = Batch(shard_bytes, int(kv_bytes * each), max(1, round(each)))
        crowded = max(1.0, _SLOWED * spec.slo_tpot_s / alone_s(rates, batch))
        busy = -math.expm1(-each)
        there = -math.expm1(-each - rate_per_s / copies * _LINGERS_S)
        return Applicant(
            spec.name,
            rate_per_s,
            copies * busy * bandwidth_share(rates, batch) * spec.tp / crowded,
            copies * there * spec.tp * (shard_bytes + device.engine_bytes) + running * kv_bytes * spec.tp,
            served,
        )
