"""How long batches take on an overloaded instance and one that loads beside it: the model behind the choice of how
they share them, and the second opinion on the queue rule.

A device's step takes a batch's own time per layer, layers arrive one after the other at equal distance, and
activations travel in no time (BlitzScale 5.2).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prism.policy.live.zigzag import ZigZagQueue, ZigZagWork


class PairRule(StrEnum):
    """Which instance runs which layers while the new one loads."""

    ZIGZAG = "zigzag"
    BEST_EFFORT = "best-effort"
    """A batch gets on the new one the layers that are there when its turn comes, half of all at most."""
    STOP = "stop"
    """The new one serves when it has everything."""


@dataclass(frozen=True, slots=True)
class PairedBatch:
    """A batch that one instance alone would run for ``layers`` times ``layer_s``."""

    name: str
    arrival_s: float
    layer_s: float


def finish_pair(rule: PairRule, batches: Sequence[PairedBatch], layers: int, load_s: float) -> dict[str, float]:
    """When each batch is finished, by name; ``load_s`` is the time of one layer, loading begins at 0, and the batches
    come in the order of their arrival. Raises ``ValueError`` on times that run backwards."""
    arrivals = [b.arrival_s for b in batches]
    if arrivals != sorted(arrivals) or load_s < 0 or any(b.layer_s <= 0 for b in batches):
        raise ValueError("batches come in the order of their arrival, and layers take time")
    if rule is PairRule.ZIGZAG:
        return _ZigZagRun(batches, layers, load_s).run()
    if rule is PairRule.BEST_EFFORT:
        return _best_effort(batches, layers, load_s)
    return _stop(batches, layers, load_s)


class _ZigZagRun:
    """Events: an arrival, a layer, the end of a piece of work. Both sides ask for work after each."""

    def __init__(self, batches: Sequence[PairedBatch], layers: int, load_s: float) -> None:
        self._layer_s = {b.name: b.layer_s for b in batches}
        self._queue = ZigZagQueue(layers)
        self._busy = {"new": False, "old": False}
        self._events: list[tuple[float, int, str, str]] = []
        self._number = 0
        self._finish: dict[str, float] = {}
        for batch in batches:
            self._at(batch.arrival_s, "arrive", batch.name)
        for layer in range(1, layers + 1):
            self._at(layer * load_s, "load", str(layer))

    def _at(self, time_s: float, what: str, name: str) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, what, name))

    def run(self) -> dict[str, float]:
        while self._events:
            now_s = self._events[0][0]
            while self._events and self._events[0][0] == now_s:
                _, _, what, name = heapq.heappop(self._events)
                self._happened(what, name, now_s)
            self._give("new", now_s)
            self._give("old", now_s)
        return self._finish

    def _happened(self, what: str, name: str, now_s: float) -> None:
        if what == "arrive":
            self._queue.arrive(name)
        elif what == "load":
            self._queue.load(int(name))
        else:
            self._busy[what] = False
            if self._queue.done(name):
                self._finish[name] = now_s

    def _give(self, side: str, now_s: float) -> None:
        if self._busy[side]:
            return
        work: ZigZagWork | None = self._queue.for_new() if side == "new" else self._queue.for_old()
        if work is not None:
            self._busy[side] = True
            self._at(now_s + (work.end - work.first) * self._layer_s[work.batch], side, work.batch)


def _best_effort(batches: Sequence[PairedBatch], layers: int, load_s: float) -> dict[str, float]:
    """In the order of arrival: what the old one can begin before the first layer is there, it runs alone; of all
    else the new one runs at once what it has, and the old one the rest after it."""
    new_free, old_free = load_s, 0.0
    finish: dict[str, float] = {}
    for batch in batches:
        mine = 0
        if max(batch.arrival_s, old_free) >= load_s:
            begin_s = max(batch.arrival_s, new_free)
            mine = layers // 2 if begin_s >= layers // 2 * load_s else int(begin_s / load_s)
            new_free = begin_s + mine * batch.layer_s
        ready_s = new_free if mine else batch.arrival_s
        old_free = max(old_free, ready_s) + (layers - mine) * batch.layer_s
        finish[batch.name] = old_free
    return finish


def _stop(batches: Sequence[PairedBatch], layers: int, load_s: float) -> dict[str, float]:
    """Each batch to the instance that would finish it first; the new one begins when all layers are there."""
    free = [0.0, layers * load_s]
    finish: dict[str, float] = {}
    for batch in batches:
        ends = [max(f, batch.arrival_s) + layers * batch.layer_s for f in free]
        side = ends.index(min(ends))
        free[side] = finish[batch.name] = ends[side]
    return finish
