"""Engines on one device share its compute and memory bandwidth (MPS with 100% for everybody).

Each engine that steps brings the load its step has when it runs alone. While the loads of all fit into the device they
do not slow each other down; beyond that everyone runs at the same fraction of its own speed, the largest at which no
resource is over-committed::

    slowdown = max(1, sum of compute loads, sum of memory loads, sum of larger loads / overlap_gain)

The last term bounds what engines gain by leaning on different resources. A straggler is a pool with ``speed`` below 1.
On a host whose cores play devices, engines beyond its cores cost more than their share (:class:`Crowd`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from prism.sim.roofline import Load


class Sharer(Protocol):
    """Somebody whose step runs on a pool."""

    def speed_changed(self) -> None:
        """The pool's :attr:`Pool.rate` is another from now on."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Engines that step beyond ``cores`` slow everyone down by ``more`` of its time alone each: cores change hands
    within steps, and caches with them."""

    cores: int
    more: float


class Pool:
    """Compute and bandwidth of one device, or of the host whose cores play several devices."""

    __slots__ = ("_crowd", "_loads", "_overlap_gain", "background", "rate", "speed")

    def __init__(self, overlap_gain: float, background: float = 0.0, crowd: Crowd | None = None) -> None:
        self._loads: dict[Sharer, Load] = {}
        self._overlap_gain, self._crowd = overlap_gain, crowd
        self.background = background
        """Compute that others than engines use all the time (0..1)."""
        self.speed = 1.0
        self.rate = 1.0
        """Seconds of work done per second by every sharer."""

    def set_load(self, sharer: Sharer, load: Load | None) -> None:
        """``sharer`` steps with ``load`` from now on, or rests (None). Others are told when their rate changed; the
        sharer itself looks at :attr:`rate`."""
        if load is None:
            if self._loads.pop(sharer, None) is None:
                return
        else:
            self._loads[sharer] = load
        self._update(sharer)

    def set_speed(self, speed: float) -> None:
        """The device runs at ``speed`` times its normal rates (a straggler has less than 1)."""
        self.speed = speed
        self._update(None)

    def beside_threads(self, core: float) -> float:
        """How many times longer one thread's work takes beside what runs now, if it lasts: threads that each can use
        ``core`` of the compute have the cores in turns."""
        return max(1.0, self.background + core * (1 + len(self._loads))) / self.speed

    def _update(self, cause: Sharer | None) -> None:
        compute, memory, larger = self.background, 0.0, self.background
        for load in self._loads.values():
            compute += load.compute
            memory += load.memory
            larger += load.compute if load.compute > load.memory else load.memory
        slowdown = max(1.0, compute, memory, larger / self._overlap_gain)
        if self._crowd is not None and (beyond := len(self._loads) - self._crowd.cores) > 0:
            slowdown += beyond * self._crowd.more
        rate = self.speed / slowdown
        if rate != self.rate:
            self.rate = rate
            for sharer in list(self._loads):
                if sharer is not cause:
                    sharer.speed_changed()
