"""Has engines of a device stand still as its scheduler wants it (:mod:`prism.scheduler.gpu_pauses`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Final

from prism.core.ids import RequestId
from prism.core.instances import InstanceKey
from prism.engine.api import Handle
from prism.node.measures import NodeMeasures
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.gpu_pauses import LOOK_EVERY_S

HELD_S: Final = 2 * LOOK_EVERY_S
"""A pause that is not renewed ends by itself: an agent that is late, or gone, stops no engine."""


class HeldSteps:
    """Of one device. Looks when an answer begins or ends and when something else may change what was decided.
    ``handles`` are those that serve; all methods are called on the agent's loop and none blocks."""

    def __init__(
        self,
        scheduler: GpuScheduler,
        handles: Mapping[InstanceKey, Handle],
        measures: NodeMeasures,
        now_s: Callable[[], float],
    ) -> None:
        self._scheduler, self._handles, self._measures, self._now_s = scheduler, handles, measures, now_s
        self._on = scheduler.settings.longest_pause_s > 0.0
        self._made: dict[InstanceKey, dict[RequestId, int]] = {}
        self._held: dict[InstanceKey, float] = {}
        """Who stands still, and up to when that is counted."""
        self._changed = asyncio.Event()

    def begin(self, handle: Handle) -> None:
        """It serves from now on: it is to tell what its answers have."""
        if self._on:
            handle.hold(0.0)

    def end(self, key: InstanceKey) -> None:
        """It is gone."""
        self._made.pop(key, None)
        self._held.pop(key, None)
        self.changed()

    def told(self, key: InstanceKey, after_first: dict[str, int]) -> None:
        """What its answers have after their first token."""
        self._made[key] = {RequestId(id): count for id, count in after_first.items()}

    def changed(self) -> None:
        """An answer began or ended."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled; ends at once where nobody ever stands still."""
        while self._on:
            next_s = self._scheduler.pauses.next_look_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(next_s) else max(0.0, next_s - self._now_s())):
                    await self._changed.wait()
            self._changed.clear()
            self.look()

    def look(self) -> None:
        """Decide again, and tell engines."""
        now_s = self._now_s()
        holds = {hold.key: hold for hold in self._scheduler.pauses.look(self._made, now_s)}
        for key, since_s in list(self._held.items()):
            self._measures.held(key.model, self._scheduler.device, now_s - since_s)
            if key not in holds:
                del self._held[key]
                self._tell(key, 0.0)
        for key, hold in holds.items():
            if key not in self._held:
                self._measures.decision(hold)
            self._held[key] = now_s
            self._tell(key, HELD_S)

    def _tell(self, key: InstanceKey, for_s: float) -> None:
        if (handle := self._handles.get(key)) is not None:
            handle.hold(for_s)
