"""An agent's last minute: models and requests go to other machines, then the KV that is stored here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from prism.node.kv_handover import KvHandover

log = logging.getLogger(__name__)

LEAVE_S: Final = 60.0
"""For all of it; the supervisor waits a little longer (:data:`prism.supervisor.node.LEAVE_S`)."""
LOOK_S: Final = 0.05


class Leaving:
    """``busy``: something runs or waits here. ``kv``: None where none is stored, or nobody could take it."""

    def __init__(self, busy: Callable[[], bool], changed: asyncio.Event, kv: KvHandover | None) -> None:
        self._busy, self._changed, self._kv = busy, changed, kv
        self.begun = self.done = False

    async def run(self, limit_s: float = LEAVE_S) -> None:
        """Returns when nothing is left here that others want, or after ``limit_s`` (the controller then takes what
        stands in the queues). Cancel it to leave at once."""
        log.info("leaving the fleet")
        self.begun = True
        self._changed.set()
        end_s = time.monotonic() + limit_s
        for _ in range(int(limit_s / LOOK_S)):
            if not self._busy():
                break
            await asyncio.sleep(LOOK_S)
        if self._kv is not None and not self._busy():
            await self._kv.run(end_s - time.monotonic())
        self.done = True
