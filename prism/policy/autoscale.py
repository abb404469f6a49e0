"""How many instances a model should have (BlitzScale, scaling policy; ALGORITHMS section 7).

Load is measured against what one instance can do, so that 1 means just full. Up at once, by as many instances as the
load needs; down one at a time, after the load has stayed low for a while.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaleBounds:
    """Hysteresis of the scaling decision."""

    upper: float = 0.95
    """Average load of the instances above which there are too few of them."""
    lower: float = 0.6
    """Average load that the remaining ones would have, below which there is one too many."""
    down_after_s: float = 5.0
    """How long it must have stayed low."""


class AutoScaler:
    """Decides for one model; remembers only since when the load is low."""

    __slots__ = ("_bounds", "_low_since_s")

    def __init__(self, bounds: ScaleBounds) -> None:
        self._bounds = bounds
        self._low_since_s: float | None = None

    def decide_target(self, now_s: float, instances: int, load: float) -> int:
        """The number of instances there should be; ``load`` is the average over the ``instances`` (at least one). Takes
        note of how long the load has been low: ask once per observation."""
        if load > self._bounds.upper:
            self._low_since_s = None
            return max(instances + 1, math.ceil(instances * load / self._bounds.upper))
        if instances == 1 or load * instances / (instances - 1) >= self._bounds.lower:
            self._low_since_s = None
            return instances
        if self._low_since_s is None:
            self._low_since_s = now_s
        if now_s - self._low_since_s < self._bounds.down_after_s:
            return instances
        self._low_since_s = now_s
        return instances - 1


_NOT_FULL = 0.9
"""Highest load of instances at which nothing waits."""


class CapacityEstimate:
    """What one instance can do, in requests/s, learned while requests wait for it.

    While nothing waits nobody knows how much more would fit; then the load is the rate over the last estimate, and the
    instances are not full.
    """

    __slots__ = ("_per_instance",)

    def __init__(self) -> None:
        self._per_instance: float | None = None

    def observe_load(self, instances: int, rate_per_s: float, running: float, waiting: float) -> float:
        """Average load of ``instances`` that run ``running`` requests in all while ``waiting`` more wait. Learns from
        it."""
        if waiting >= max(1.0, 0.05 * running):
            load = (running + waiting) / max(running, 1.0)
            seen = rate_per_s / instances / load
            self._per_instance = seen if self._per_instance is None else 0.8 * self._per_instance + 0.2 * seen
            return load
        if not self._per_instance:
            return 0.0 if instances == 1 else 0.5 * (instances - 1) / instances
        self._per_instance = max(self._per_instance, rate_per_s / instances)
        return min(_NOT_FULL, rate_per_s / (instances * self._per_instance))
