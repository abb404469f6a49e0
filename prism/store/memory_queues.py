"""Queues in one process's memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prism.policy.routing import least_loaded, queue_load
from prism.store.values import MOST_BEFORE, Entry, QueueFull, Withdrawn


@dataclass(slots=True)
class _Row:
    request_id: str
    data: bytes
    owner: str = ""
    beaten_s: float = 0.0
    deliveries: int = 0


@dataclass(slots=True)
class _Queue:
    rows: OrderedDict[str, _Row] = field(default_factory=OrderedDict)
    unread: OrderedDict[str, None] = field(default_factory=OrderedDict)


class MemoryQueues:
    """The queue half of :class:`prism.store.memory.MemoryStore`. ``clock`` is monotonic seconds, for idle times."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[str, _Queue] = {}
        self._where: dict[str, tuple[str, str]] = {}
        self._numbers = itertools.count(1)
        self._arrived = asyncio.Event()
        self._running: dict[str, int] = {}

    def _append(self, queue: str, request_id: str, data: bytes) -> int:
        into = self._queues.setdefault(queue, _Queue())
        entry_id = str(next(self._numbers))
        into.rows[entry_id] = _Row(request_id, data)
        into.unread[entry_id] = None
        self._where[request_id] = (queue, entry_id)
        self._arrived.set()
        return len(into.rows)

    def _drop(self, queue: str, entry_id: str) -> None:
        row = self._queues[queue].rows.pop(entry_id)
        self._queues[queue].unread.pop(entry_id, None)
        if self._where.get(row.request_id) == (queue, entry_id):
            del self._where[row.request_id]

    def _rows(self, queue: str) -> OrderedDict[str, _Row]:
        found = self._queues.get(queue)
        return found.rows if found is not None else OrderedDict()

    async def add(self, queue: str, request_id: str, data: bytes, limit: int | None = None) -> int:
        length = len(self._rows(queue))
        if request_id in self._where:
            return length
        if limit is not None and length >= limit:
            raise QueueFull(queue, length, limit)
        return self._append(queue, request_id, data)

    async def add_to_least(self, queues: Sequence[str], request_id: str, data: bytes, limit: int | None = None) -> str:
        await self.add(self._least(queues), request_id, data, limit)
        return self._where[request_id][0]

    def _least(self, queues: Sequence[str]) -> str:
        return least_loaded(queues, lambda queue: queue_load(len(self._rows(queue)), self._running.get(queue)))

    async def tell_running(self, queue: str, running: int) -> None:
        self._running[queue] = running

    async def forget(self, queue: str) -> None:
        if not self._rows(queue):
            self._queues.pop(queue, None)
            self._running.pop(queue, None)

    async def read_new(self, queues: Sequence[str], consumer: str, count: int, block_s: float) -> list[Entry]:
        give_up = time.monotonic() + block_s
        while True:
            self._arrived.clear()
            found = [entry for queue in queues for entry in self._unread(queue, consumer, count)]
            left_s = give_up - time.monotonic()
            if found or left_s <= 0:
                return found
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 0.05)):
                    await self._arrived.wait()

    def _unread(self, queue: str, consumer: str, count: int) -> list[Entry]:
        found = self._queues.get(queue)
        ids = list(itertools.islice(found.unread, count)) if found is not None else []
        return [self._give(queue, entry_id, self._rows(queue)[entry_id], consumer) for entry_id in ids]

    def _give(self, queue: str, entry_id: str, row: _Row, consumer: str) -> Entry:
        self._queues[queue].unread.pop(entry_id, None)
        row.owner, row.beaten_s, row.deliveries = consumer, self._clock(), row.deliveries + 1
        return Entry(queue, entry_id, row.request_id, row.data, row.deliveries)

    async def take_over(self, queue: str, consumer: str, idle_s: float, count: int = 100) -> list[Entry]:
        now = self._clock()
        stale = (
            (i, row)
            for i, row in self._rows(queue).items()
            if row.owner not in ("", consumer) and now - row.beaten_s >= idle_s
        )
        return [self._give(queue, entry_id, row, consumer) for entry_id, row in list(itertools.islice(stale, count))]

    async def beat(self, queue: str, consumer: str) -> int:
        mine = [row for row in self._rows(queue).values() if row.owner == consumer]
        for row in mine:
            row.beaten_s = self._clock()
        return len(mine)

    async def owned(self, queue: str, consumer: str) -> list[str]:
        return [row.request_id for row in self._rows(queue).values() if row.owner == consumer]

    async def done(self, entry: Entry, consumer: str) -> bool:
        row = self._rows(entry.queue).get(entry.entry_id)
        if row is None:
            return True
        if row.owner not in ("", consumer):
            return False
        self._drop(entry.queue, entry.entry_id)
        return True

    async def move(self, entry: Entry, consumer: str, to_queue: str, data: bytes | None = None) -> bool:
        row = self._rows(entry.queue).get(entry.entry_id)
        if row is None:
            return self._where.get(entry.request_id, ("", ""))[0] == to_queue
        if row.owner != consumer:
            return False
        self._drop(entry.queue, entry.entry_id)
        self._append(to_queue, row.request_id, row.data if data is None else data)
        return True

    async def move_to_least(self, entry: Entry, consumer: str, to_queues: Sequence[str], data: bytes) -> bool:
        there = self._where.get(entry.request_id, ("", ""))[0]
        moved = entry.entry_id not in self._rows(entry.queue) and there in to_queues
        return moved or await self.move(entry, consumer, self._least(to_queues), data)

    async def withdraw(self, request_id: str) -> Withdrawn:
        queue, entry_id = self._where.get(request_id, ("", ""))
        if not queue:
            return Withdrawn(False)
        owner = self._rows(queue)[entry_id].owner
        if not owner:
            self._drop(queue, entry_id)
        return Withdrawn(not owner, queue, owner)

    async def where(self, request_ids: Sequence[str]) -> list[str | None]:
        return [self._where[i][0] if i in self._where else None for i in request_ids]

    async def lengths(self, queues: Sequence[str]) -> list[int]:
        return [len(self._rows(queue)) for queue in queues]

    async def position(self, request_id: str) -> int | None:
        queue, entry_id = self._where.get(request_id, ("", ""))
        return min(MOST_BEFORE, list(self._rows(queue)).index(entry_id)) if queue else None
