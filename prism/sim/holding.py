"""Has engines of a simulated device stand still as its scheduler wants it (:mod:`prism.scheduler.gpu_pauses`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from prism.core.effects import Hold
from prism.core.instances import InstanceKey
from prism.scheduler.gpu_pauses import Pauses
from prism.sim.engine import Engine
from prism.sim.queue import EventQueue


class HeldEngines:
    """Owned by a device. Looks when an answer begins or ends and whenever something else may change what was decided.
    ``decided`` hears of every engine that begins to stand still."""

    def __init__(
        self,
        queue: EventQueue,
        pauses: Pauses,
        engines: Mapping[InstanceKey, Engine],
        decided: Callable[[Hold], None],
    ) -> None:
        self._queue, self._pauses, self._engines, self._decided = queue, pauses, engines, decided
        self._held: dict[InstanceKey, None] = {}
        """In the order in which they began: a run is the same whatever names hash to."""
        self._alarm = queue.alarm(self._look)

    def changed(self) -> None:
        """An answer began or ended: it is looked at once, after what happens now."""
        if self._held or self._pauses.wanted:
            self._alarm.set(self._queue.now_s)

    def _look(self, _: object) -> None:
        now_s, pauses = self._queue.now_s, self._pauses
        made = {key: engine.made() for key, engine in self._engines.items()} if pauses.wanted else {}
        holds = {hold.key: hold for hold in pauses.look(made, now_s)}
        for key in [key for key in self._held if key not in holds]:
            del self._held[key]
            if (engine := self._engines.get(key)) is not None:
                engine.go_on(now_s)
        for key, hold in holds.items():
            if key not in self._held:
                self._held[key] = None
                self._decided(hold)
                self._engines[key].hold(now_s)
        if pauses.next_look_s < math.inf:
            self._alarm.set(pauses.next_look_s)

    def stop(self) -> None:
        """The device is gone."""
        self._alarm.clear()
