"""Writes to the queues that must happen in the end: acknowledge a request, move it to another queue.

The store may be away for a while (its server was killed and is being restarted). Then the writes wait here and are
repeated; repeating is safe, because the store refuses a write of an entry that somebody else owns and accepts one that
was carried out before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from prism.store.interface import Queues
from prism.store.values import Entry, StoreUnavailable

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5


class Ledger:
    """Background writes of one consumer. :meth:`drain` waits for all of them."""

    def __init__(self, store: Queues, consumer: str) -> None:
        self._store = store
        self._consumer = consumer
        self._tasks: set[asyncio.Task[None]] = set()

    def done(self, entry: Entry) -> None:
        """Acknowledge and delete ``entry``, soon."""
        self._start(lambda: self._store.done(entry, self._consumer), f"acknowledge {entry.request_id}")

    def move(self, entry: Entry, to_queues: Sequence[str], data: bytes) -> None:
        """Move ``entry`` with new contents to the least loaded of ``to_queues``, soon."""
        self._start(
            lambda: self._store.move_to_least(entry, self._consumer, to_queues, data),
            f"move {entry.request_id} to {' or '.join(to_queues)}",
        )

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, write: Callable[[], Awaitable[bool]], what: str) -> None:
        task = asyncio.create_task(self._insist(write, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _insist(self, write: Callable[[], Awaitable[bool]], what: str) -> None:
        while True:
            try:
                if not await write():
                    log.warning("%s: another consumer owns it", what)
                return
            except StoreUnavailable as error:
                log.warning("%s: the store is away (%s), trying again", what, error)
                await asyncio.sleep(RETRY_S)
