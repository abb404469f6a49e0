"""Reads one device's queue: first what an earlier agent held, then what is new, for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from prism.store.interface import Queues
from prism.store.ledger import Ledger
from prism.store.values import Entry, StoreUnavailable
from prism.wire.messages import Submission

log = logging.getLogger(__name__)

READ_COUNT: Final = 256
BLOCK_S: Final = 1.0
AWAY_S: Final = 0.2
"""Pause when the store is away."""


class QueueReader:
    """``admit`` gets every entry that can be read, with what stands in it; others are dropped. :meth:`take_over` once,
    then :meth:`run` until cancelled."""

    def __init__(
        self, store: Queues, queue: str, consumer: str, ledger: Ledger, admit: Callable[[Entry, Submission], None]
    ) -> None:
        self._store, self._queue, self._consumer = store, queue, consumer
        self._ledger, self._admit = ledger, admit

    async def take_over(self) -> None:
        """Admits everything that another consumer has read and not finished."""
        while True:
            try:
                entries = await self._store.take_over(self._queue, self._consumer, idle_s=0.0)
            except StoreUnavailable as error:
                await self._away(error)
                continue
            if not entries:
                return
            log.info("%s: took over %d requests", self._queue, len(entries))
            self._admit_all(entries)

    async def run(self) -> None:
        """Admits new entries as they come."""
        while True:
            try:
                entries = await self._store.read_new([self._queue], self._consumer, READ_COUNT, BLOCK_S)
            except StoreUnavailable as error:
                await self._away(error)
                continue
            self._admit_all(entries)

    async def _away(self, error: StoreUnavailable) -> None:
        log.warning("%s: cannot read the queue: %s", self._queue, error)
        await asyncio.sleep(AWAY_S)

    def _admit_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            try:
                submission = entry.submission
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                log.error("%s: dropped an unreadable entry %s: %s", self._queue, entry.entry_id, error)
                self._ledger.done(entry)
            else:
                self._admit(entry, submission)
