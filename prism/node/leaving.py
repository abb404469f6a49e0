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
ALONE_S: Final = 5.0
"""After so long without a controller nobody is expected to fetch models. The lease of a dead one has ended before, and
a supervisor starts the next one within a second or two."""
LOOK_S: Final = 0.05


class Leaving:
    """``models``: whether some are here. ``requests``: how many run or wait here. ``kv``: None where none is stored, or
    nobody could take it."""

    def __init__(
        self,
        models: Callable[[], bool],
        requests: Callable[[], int],
        changed: asyncio.Event,
        kv: KvHandover | None,
    ) -> None:
        self._models, self._requests, self._changed, self._kv = models, requests, changed, kv
        self.begun = self.done = False
        self._controller_s = time.monotonic()

    def note_controller(self) -> None:
        """There is one."""
        self._controller_s = time.monotonic()

    async def run(self, limit_s: float = LEAVE_S) -> None:
        """Returns when nothing is left here that others want, or after ``limit_s`` (the controller then takes what
        stands in the queues). Without a controller what runs here is answered, and nothing else is waited for. Cancel
        it to leave at once."""
        log.info("leaving the fleet")
        self.begun = True
        self._changed.set()
        end_s = time.monotonic() + limit_s
        for _ in range(int(limit_s / LOOK_S)):
            if not self._busy() or self._alone():
                break
            await asyncio.sleep(LOOK_S)
        if self._kv is not None and not self._busy():
            await self._kv.run(end_s - time.monotonic())
        self.done = True

    def _busy(self) -> bool:
        return self._models() or self._requests() > 0

    def _alone(self) -> bool:
        """Who answers could not be replaced, so that it goes on; models that rest have nobody to fetch them."""
        alone_s = time.monotonic() - self._controller_s
        if self._requests() or alone_s <= ALONE_S:
            return False
        log.warning("there has been no controller for %.0f s: models and KV stay where they are", alone_s)
        return True
