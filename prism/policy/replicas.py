"""How many instances of a model its load asks for now, and how many its bursts have asked for (not in the Prism paper,
which gives every model one; BlitzScale's scaling policy, ALGORITHMS section 7, with its bounds learned)."""

from __future__ import annotations

import math
from typing import Final, NamedTuple


class ModelLoad(NamedTuple):
    """A model's load over all its instances that serve, at one moment."""

    instances: int
    running: int
    waiting: int
    hot: bool
    """Requests have been waiting for longer than they can bear, or will."""
    arrivals_per_s: float
    """Of the last moments."""
    served_per_s: float
    """First tokens of the last moments."""
    usual_per_s: float
    """Arrivals of the last minute."""
    residence_s: float
    """How long a request runs, on average; 0: not known."""
    room: float
    """Requests that one instance can run with its steps within their objective; infinite: not known, or no objective
    that more instances could meet."""


_AT_LEAST: Final = 2.0
"""So many times the instances there are, when requests wait for longer than they can bear: one more at a time would
take as many loads one after the other."""
_FULL: Final = 0.8
"""Part of its room that an instance should use."""
_WAIT_FOR_ONE: Final = 2
"""A further instance is made for so many requests that wait, so that a few at once do not fill the fleet."""


def instances_needed(load: ModelLoad) -> int:
    """At least 1, without an upper bound:

    1. for the requests that are here, and for those that will be when what arrives now has been here for a residence:
       as many as keep every instance within its room;
    2. when requests wait for too long: as many times more as requests arrive faster than they are served, or than they
       usually do (a moment after a burst began the first is not known yet), and at least twice as many; one more for
       every two that wait at most.
    """
    concurrency = max(float(load.running + load.waiting), load.arrivals_per_s * load.residence_s)
    needed = concurrency / (_FULL * load.room) if load.room > 0.0 else 0.0  # 1
    if load.hot:  # 2
        most = load.instances + max(1, load.waiting // _WAIT_FOR_ONE)
        times = max(
            _AT_LEAST, _times(load.arrivals_per_s, load.served_per_s), _times(load.arrivals_per_s, load.usual_per_s)
        )
        needed = max(needed, min(float(most), load.instances * times))
    return max(1, math.ceil(needed - 1e-9))


def _times(rate: float, than: float) -> float:
    return rate / than if than > 0.0 else 0.0


class PeakHold:
    """The highest number seen in a time of ``span_s`` at least and twice that at most, in O(1)."""

    __slots__ = ("_before", "_now", "_period", "_span_s")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._period = 0
        self._now = self._before = 0.0

    def note(self, value: float, now_s: float) -> None:
        """``value`` (>= 0) holds now; ``now_s`` never decreases."""
        self._turn(now_s)
        self._now = max(self._now, value)

    def peak(self, now_s: float) -> float:
        """0 when nothing was noted for long enough."""
        self._turn(now_s)
        return max(self._now, self._before)

    def _turn(self, now_s: float) -> None:
        period = int(now_s // self._span_s)
        if period > self._period:
            self._before = self._now if period == self._period + 1 else 0.0
            self._now, self._period = 0.0, period
