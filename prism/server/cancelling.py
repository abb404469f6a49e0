"""Stops a request wherever it is: still unread in a queue, held by a scheduler, or running in an engine."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from prism.store.interface import Store
from prism.store.values import StoreError
from prism.wire.mailbox import Outbox
from prism.wire.messages import Cancel

log = logging.getLogger(__name__)

AGAIN_S: Final = (0.0, 0.2, 1.0, 3.0)
"""A request may change hands while it is being cancelled (its agent died, it moved to another queue): look again."""


class Canceller:
    """Cancels are attempts: whoever runs a request whose front door forgot it learns so when it asks."""

    def __init__(self, store: Store, outbox: Outbox) -> None:
        self._store, self._outbox = store, outbox

    async def cancel(self, request_id: str, reason: str) -> None:
        """Returns when the request is in no queue any more, or after a few tries."""
        for pause_s in AGAIN_S:
            await asyncio.sleep(pause_s)
            try:
                found = await self._store.withdraw(request_id)
                if found.removed or not found.owner:
                    return
                mailbox = await self._mailbox(found.owner)
            except StoreError as error:
                log.warning("request could not be cancelled yet: %s", error, extra={"request": request_id})
                continue
            if mailbox is not None:
                self._outbox.send(mailbox, Cancel(id=request_id, reason=reason))

    async def _mailbox(self, consumer: str) -> str | None:
        controller = await self._store.controller()
        if controller is not None and controller.id == consumer:
            return controller.mailbox
        agents = await self._store.agents()
        return next((agent.mailbox for agent in agents if agent.detail.get("consumer") == consumer), None)
