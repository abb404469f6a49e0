"""Queues on Redis streams with one consumer group each."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis.exceptions as errors

from prism.policy.routing import WAITING_WEIGHS
from prism.store.connection import LOST, Connection
from prism.store.values import MOST_BEFORE, Entry, QueueFull, Withdrawn
from prism.wire import keys

T = TypeVar("T")


def _entries(queue: str, rows: Sequence[tuple[bytes, Any]]) -> list[Entry]:
    """Entries of one stream's reply; a row without fields was deleted meanwhile."""
    found = []
    for entry_id, fields in rows:
        if fields:
            row = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
            found.append(Entry(queue, entry_id.decode(), row[b"i"].decode(), row[b"d"]))
    return found


class RedisQueues:
    """The queue half of :class:`prism.store.redis.RedisStore`.

    A reply lost with the connection leaves entries that this consumer owns without knowing. So every entry handed out
    is noted in ``_held``, and after each loss of the connection the consumer's own pending list is read once more; what
    is in it and not noted is handed out then.
    """

    def __init__(self, connection: Connection) -> None:
        self._conn = connection
        self._groups: set[str] = set()
        self._held: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._seen_losses: dict[tuple[str, str], int] = {}

    async def add(self, queue: str, request_id: str, data: bytes, limit: int | None = None) -> int:
        return (await self._add([queue], request_id, data, limit))[0]

    async def add_to_least(self, queues: Sequence[str], request_id: str, data: bytes, limit: int | None = None) -> str:
        return (await self._add(queues, request_id, data, limit))[1]

    async def _add(self, queues: Sequence[str], request_id: str, data: bytes, limit: int | None) -> tuple[int, str]:
        """Length and name of the queue that has it."""
        bound = -1 if limit is None else limit
        args: list[str | bytes | int | float] = [keys.GROUP, request_id, data, bound, WAITING_WEIGHS]
        added, length, queue = await self._conn.script("ADD", [keys.REQUESTS, keys.RUNNING, *queues], args)
        if not added:
            raise QueueFull(queue.decode(), int(length), limit or 0)
        return int(length), queue.decode()

    async def tell_running(self, queue: str, running: int) -> None:
        await self._conn.run(lambda: self._conn.client.hset(keys.RUNNING, queue, str(running)))

    async def forget(self, queue: str) -> None:
        if await self._conn.script("FORGET", [queue, keys.RUNNING], [keys.GROUP]):
            self._groups.discard(queue)

    async def read_new(self, queues: Sequence[str], consumer: str, count: int, block_s: float) -> list[Entry]:
        await self._ensure_groups(queues)
        found = await self._recover(queues, consumer)
        if found or not queues:
            return found
        block_ms = max(1, int(block_s * 1000)) if block_s > 0 else None
        streams = dict.fromkeys(queues, ">")
        try:
            async with asyncio.timeout(block_s + 5.0):
                reply = await self._conn.client.xreadgroup(keys.GROUP, consumer, streams, count=count, block=block_ms)
        except LOST:
            self._conn.lost()
            await self._conn.run(self._conn.client.ping)
            return await self._recover(queues, consumer)
        except errors.ResponseError as error:
            if not _is_emptied(error):
                raise
            self._groups.clear()
            return []
        return self._hand_out(consumer, reply)

    async def take_over(self, queue: str, consumer: str, idle_s: float, count: int = 100) -> list[Entry]:
        await self._ensure_groups([queue])
        losses = self._conn.losses
        args: list[str | bytes | int | float] = [keys.GROUP, consumer, int(idle_s * 1000), count]
        rows = await self._grouped(queue, lambda: self._conn.script("TAKE_OVER", [queue], args))
        held = self._held[queue, consumer]
        found = []
        for entry_id, fields, deliveries in rows:
            for entry in _entries(queue, [(entry_id, fields)]):
                held.add(entry.entry_id)
                found.append(Entry(queue, entry.entry_id, entry.request_id, entry.data, int(deliveries)))
        if self._conn.losses != losses:
            found += await self._own_unknown(queue, consumer)
        return found

    async def beat(self, queue: str, consumer: str) -> int:
        await self._ensure_groups([queue])
        return int(await self._grouped(queue, lambda: self._conn.script("BEAT", [queue], [keys.GROUP, consumer])))

    async def owned(self, queue: str, consumer: str) -> list[str]:
        await self._ensure_groups([queue])
        return [entry.request_id for entry in await self._pending(queue, consumer)]

    async def done(self, entry: Entry, consumer: str) -> bool:
        args: list[str | bytes | int | float] = [keys.GROUP, consumer, entry.entry_id, entry.request_id]
        script = lambda: self._conn.script("DONE", [entry.queue, keys.REQUESTS], args)  # noqa: E731
        ended = await self._grouped(entry.queue, script)
        self._held[entry.queue, consumer].discard(entry.entry_id)
        return bool(ended)

    async def move(self, entry: Entry, consumer: str, to_queue: str, data: bytes | None = None) -> bool:
        return await self.move_to_least(entry, consumer, [to_queue], entry.data if data is None else data)

    async def move_to_least(self, entry: Entry, consumer: str, to_queues: Sequence[str], data: bytes) -> bool:
        args: list[str | bytes | int | float] = [keys.GROUP, consumer, entry.entry_id, entry.request_id, data]
        args.append(WAITING_WEIGHS)
        where = [entry.queue, keys.REQUESTS, keys.RUNNING, *to_queues]
        script = lambda: self._conn.script("MOVE", where, args)  # noqa: E731
        moved = await self._grouped(entry.queue, script)
        self._held[entry.queue, consumer].discard(entry.entry_id)
        return bool(moved)

    async def withdraw(self, request_id: str) -> Withdrawn:
        removed, queue, owner = await self._conn.script("WITHDRAW", [keys.REQUESTS], [keys.GROUP, request_id])
        return Withdrawn(bool(removed), queue.decode(), owner.decode())

    async def where(self, request_ids: Sequence[str]) -> list[str | None]:
        if not request_ids:
            return []
        found = await self._conn.run(lambda: self._conn.client.hmget(keys.REQUESTS, list(request_ids)))
        return [place.decode().partition(" ")[0] if place else None for place in found]

    async def lengths(self, queues: Sequence[str]) -> list[int]:
        async def ask() -> list[int]:
            async with self._conn.client.pipeline(transaction=False) as pipe:
                for queue in queues:
                    pipe.xlen(queue)
                return [int(length) for length in await pipe.execute()]

        return await self._conn.run(ask) if queues else []

    async def position(self, request_id: str) -> int | None:
        before = int(await self._conn.script("POSITION", [keys.REQUESTS], [keys.GROUP, request_id, MOST_BEFORE]))
        return before if before >= 0 else None

    async def _ensure_groups(self, queues: Sequence[str]) -> None:
        for queue in queues:
            if queue in self._groups:
                continue
            try:
                await self._conn.run(lambda q=queue: self._conn.client.xgroup_create(q, keys.GROUP, "0", mkstream=True))  # type: ignore[misc]
            except errors.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
            self._groups.add(queue)

    async def _grouped(self, queue: str, command: Callable[[], Awaitable[T]]) -> T:
        """``command()`` on a queue whose group may be gone, with all the server held: then it is made anew."""
        try:
            return await command()
        except errors.ResponseError as error:
            if not _is_emptied(error):
                raise
        self._groups.clear()
        await self._ensure_groups([queue])
        return await command()

    async def _recover(self, queues: Sequence[str], consumer: str) -> list[Entry]:
        """Entries this consumer owns without knowing, if the connection was lost since it last looked."""
        found: list[Entry] = []
        for queue in queues:
            losses = self._conn.losses
            if self._seen_losses.setdefault((queue, consumer), losses) != losses:
                found += await self._own_unknown(queue, consumer)
                self._seen_losses[queue, consumer] = losses
        return found

    async def _own_unknown(self, queue: str, consumer: str) -> list[Entry]:
        held = self._held[queue, consumer]
        found = [entry for entry in await self._pending(queue, consumer) if entry.entry_id not in held]
        held.update(entry.entry_id for entry in found)
        return found

    async def _pending(self, queue: str, consumer: str) -> list[Entry]:
        found: list[Entry] = []
        after = "0"
        while True:
            streams = {queue: after}
            reply = await self._grouped(
                queue,
                lambda s=streams: self._conn.run(  # type: ignore[misc]
                    lambda: self._conn.client.xreadgroup(keys.GROUP, consumer, s, count=500)
                ),
            )
            rows = _rows(reply)
            page = rows[0][1] if rows else []
            if not page:
                return found
            found += _entries(queue, page)
            after = page[-1][0].decode()

    def _hand_out(self, consumer: str, reply: Any) -> list[Entry]:
        found: list[Entry] = []
        for name, rows in _rows(reply):
            queue = name.decode()
            entries = _entries(queue, rows)
            self._held[queue, consumer].update(entry.entry_id for entry in entries)
            found += entries
        return found


def _is_emptied(error: errors.ResponseError) -> bool:
    """Whether the server says that it knows no such queue: somebody emptied it (FLUSHALL)."""
    return "NOGROUP" in str(error) or "no such key" in str(error)


def _rows(reply: Any) -> list[tuple[bytes, list[tuple[bytes, Any]]]]:
    """RESP2 answers a list of pairs, RESP3 a mapping to a list of pages."""
    if not reply:
        return []
    if isinstance(reply, dict):
        return [(name, pages[0] if pages and isinstance(pages[0], list) else pages) for name, pages in reply.items()]
    return list(reply)
