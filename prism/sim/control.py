"""The controller's shell: gives events to the production cluster scheduler and has done what it decides."""

from __future__ import annotations

from collections.abc import Callable

from prism.core.effects import Activate, ClusterEffect
from prism.core.events import ClusterEvent, Tick
from prism.scheduler.cluster import ClusterScheduler
from prism.sim.queue import EventQueue


class Control:
    """``carry_out`` gets the effects in order, ``ordered`` before that the activations of one decision, if any."""

    def __init__(
        self,
        queue: EventQueue,
        scheduler: ClusterScheduler,
        carry_out: Callable[[ClusterEffect], None],
        ordered: Callable[[list[Activate]], None],
    ) -> None:
        self.scheduler = scheduler
        self._queue, self._carry_out, self._ordered = queue, carry_out, ordered
        self._wake = queue.alarm(self._tick)

    def tell(self, event: ClusterEvent) -> None:
        """Give ``event`` to the scheduler and do what it wants."""
        effects = self.scheduler.on_event(event, self._queue.now_s)
        if effects:
            if orders := [effect for effect in effects if isinstance(effect, Activate)]:
                self._ordered(orders)
            for effect in list(effects):
                self._carry_out(effect)
        wake_s = self.scheduler.wake_s
        if wake_s is None:
            self._wake.clear()
        else:
            self._wake.set(wake_s)

    def _tick(self, _: object) -> None:
        self.tell(Tick())
