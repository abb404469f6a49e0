"""Between the HTTP side and the rest of Prism: submits requests, takes their tokens in, answers agents, cancels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Final

from prism.core.ids import ModelName
from prism.server.cancelling import Canceller
from prism.server.commands import Commands
from prism.server.errors import ApiError, cancelled, from_abort, from_failed, from_store, queue_full
from prism.server.following import follow, look
from prism.server.pace import Pace
from prism.server.placements import Placements
from prism.server.resuming import Resuming
from prism.server.stream import RequestStream, Sink
from prism.server.token_log import Fresh
from prism.store.interface import Store
from prism.store.values import QueueFull, StoreError
from prism.wire.mailbox import Inbox, Outbox
from prism.wire.messages import (
    AnyMessage,
    CommandResult,
    Failed,
    Finish,
    ResumeQuery,
    Submission,
    TokenItem,
    Tokens,
    encode,
)

log = logging.getLogger(__name__)

ANNOUNCE_S: Final = 1.0
AUDIT_S: Final = 5.0
LOST_AFTER_S: Final = 15.0
"""A request that stands in no queue for so long and gets no token was lost (a store that lost its data, for
example)."""


class Broker:
    """One per front-door worker; one event loop. ``max_queue`` bounds the waiting requests of all models."""

    def __init__(self, store: Store, inbox: Inbox, placements: Placements, max_queue: int, workers: int = 1) -> None:
        self.store, self.inbox, self.placements = store, inbox, placements
        self.max_queue, self._workers = max_queue, workers
        self.outbox = Outbox(keys=inbox.keys)
        self.commands = Commands(store, inbox.address)
        self.pace = Pace()
        self.streams: dict[str, RequestStream] = {}
        self.waiting: defaultdict[ModelName, int] = defaultdict(int)
        """Requests of this worker without a token, by model."""
        self._resuming = Resuming(self.streams, self.outbox, self._take_one, inbox.pending)
        self._canceller = Canceller(store, self.outbox)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self.on_resumed: Callable[[ModelName], None] = lambda model: None

    # --- requests ---

    async def submit(self, stream: RequestStream, submission: Submission) -> None:
        """Queues the request; its tokens then arrive in ``stream``. Raises :class:`ApiError` (429, 503); nothing is
        left behind then."""
        self._check_room()
        queues = self.placements.queues_for_one(stream.model)
        self.streams[stream.id] = stream
        self.waiting[stream.model] += 1
        try:
            stream.queue = await self.store.add_to_least(queues, stream.id, encode(submission), self.max_queue)
            stream.queued = True
        except QueueFull as full:
            self._drop(stream)
            raise self._full(full.length) from full
        except StoreError as error:
            self.release(stream, "could not be queued")
            raise from_store(error) from error
        except BaseException:
            self.release(stream, "the client went away")
            raise

    def _check_room(self) -> None:
        waiting = self.placements.waiting
        if waiting >= self.max_queue:
            raise self._full(waiting)

    def _full(self, waiting: int) -> ApiError:
        excess = max(0, waiting - self.max_queue) + max(1, self.max_queue // 20)
        wait_s = self.pace.wait_s(waiting, -(-excess // self._workers), time.time())
        return queue_full(waiting, self.max_queue, wait_s)

    def release(self, stream: RequestStream, reason: str) -> None:
        """The response is over. A request that is not finished is stopped wherever it is. Idempotent."""
        if stream.released or not self._drop(stream) or stream.finished:
            return
        stream.sink.forget(stream)
        self._spawn(self._canceller.cancel(stream.id, reason))

    def _drop(self, stream: RequestStream) -> bool:
        """False: it was never here."""
        stream.released = True
        if self.streams.pop(stream.id, None) is None:
            return False
        if not self.streams:
            self._idle.set()
        if stream.first_token_s is None:
            self._no_longer_waiting(stream)
        return True

    async def idle(self) -> None:
        """Returns once no request is open."""
        while self.streams:
            self._idle.clear()
            await self._idle.wait()

    def _no_longer_waiting(self, stream: RequestStream) -> None:
        self.waiting[stream.model] -= 1
        if self.waiting[stream.model] <= 0:
            del self.waiting[stream.model]

    def cancel(self, request_id: str, reason: str) -> bool:
        """An operator's cancel: all choices of the HTTP request ``request_id`` (or one of them). False: not here."""
        found = [s for s in self.streams.values() if s.id == request_id or s.id.startswith(request_id + "-")]
        for stream in found:
            stream.fail(cancelled(reason))
        return bool(found)

    async def follow(self, stream: RequestStream) -> None:
        """Its client wants to know where it stands, from now on."""
        await look(stream, self.store, self.placements)
        self._spawn(follow(stream, self.store, self.placements))

    # --- messages ---

    async def run(self) -> None:
        """Reads the mailbox, announces this worker and looks after silent requests until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mail())
            group.create_task(self._announce())
            group.create_task(self._audit())
            group.create_task(self.placements.follow())
            group.create_task(self.placements.measure())

    async def _mail(self) -> None:
        async for message in self.inbox:
            self._handle([message, *self.inbox.drain()])

    def _handle(self, messages: list[AnyMessage]) -> None:
        items: list[TokenItem] = []
        for message in messages:
            if isinstance(message, Tokens):
                items += message.items
                continue
            self._take(items)
            items = []
            self._other(message)
        self._take(items)

    def _other(self, message: AnyMessage) -> None:
        match message:
            case Finish():
                self._resuming.finish(message)
            case ResumeQuery():
                stream = self.streams.get(message.id)
                if self._resuming.query(message) and stream is not None:
                    self.on_resumed(stream.model)
            case Failed():
                self._failed(message)
            case CommandResult():
                self.commands.answer(message)
            case _:
                log.warning("unexpected message %s", type(message).__name__)

    def _failed(self, message: Failed) -> None:
        stream = self.streams.get(message.id)
        if stream is not None:
            stream.fail(from_failed(message))

    def _take_one(self, item: TokenItem) -> None:
        self._take([item])

    def _take(self, items: list[TokenItem]) -> None:
        """Hands fresh tokens to the models' sinks, each request at most once per call of a sink."""
        batches: dict[Sink, list[tuple[RequestStream, Fresh, bytes]]] = {}
        seen: set[str] = set()
        for item in items:
            stream = self.streams.get(item.id)
            fresh = stream.log.take(item) if stream is not None else None
            if stream is None or fresh is None:
                continue
            if fresh.finish is not None and fresh.finish.get("type") == "abort":
                stream.log.finish = None
                stream.fail(from_abort(fresh.finish, stream.grammar))
                continue
            if item.id in seen:
                self._deliver(batches)
                batches, seen = {}, set()
            seen.add(item.id)
            if stream.first_token_s is None:
                self._no_longer_waiting(stream)
                stream.cached_tokens = item.cached_tokens
                stream.ran_on = stream.device or self.placements.device_of(stream.model)
            batches.setdefault(stream.sink, []).append((stream, fresh, item.extra))
        self._deliver(batches)

    def _deliver(self, batches: dict[Sink, list[tuple[RequestStream, Fresh, bytes]]]) -> None:
        now_s = time.time()
        for sink, batch in batches.items():
            try:
                sink.deliver(batch)
            except Exception:
                log.exception("tokens of %d requests could not be turned into text", len(batch))
                for stream, _, _ in batch:
                    stream.fail(
                        ApiError(500, "detokenization_failed", "The answer cannot be shown.", type="server_error")
                    )
            for stream, fresh, _ in batch:
                stream.touched(now_s)
                if fresh.finish is not None:
                    self.pace.finished(now_s)

    # --- upkeep ---

    async def _announce(self) -> None:
        while True:
            with contextlib.suppress(StoreError):
                await self.store.announce_front(self.inbox.address, time.time())
            await asyncio.sleep(ANNOUNCE_S)

    async def _audit(self) -> None:
        """Ends requests that exist nowhere any more, so that no client waits for ever."""
        while True:
            await asyncio.sleep(AUDIT_S)
            now_s = time.time()
            # One that is still on its way into a busy store is in no queue either.
            queued = [s for s in self.streams.values() if s.queued]
            silent = [s for s in queued if now_s - (s.last_token_s or s.arrival_s) > AUDIT_S]
            if not silent:
                continue
            try:
                places = await self.store.where([stream.id for stream in silent])
            except StoreError:
                continue
            for stream, place in zip(silent, places, strict=True):
                self._judge(stream, place, now_s)

    def _judge(self, stream: RequestStream, place: str | None, now_s: float) -> None:
        if place is not None:
            stream.missing_since_s = None
        elif stream.missing_since_s is None:
            stream.missing_since_s = now_s
        elif now_s - stream.missing_since_s > LOST_AFTER_S and not stream.ended:
            log.error("request %s is in no queue", stream.id, extra={"model": stream.model})
            stream.fail(ApiError(503, "request_lost", "The request was lost.", type="server_error", retry_after_s=1.0))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels what is left and says goodbye to the agents. The inbox stays with its owner."""
        for stream in list(self.streams.values()):
            stream.fail(ApiError(503, "shutting_down", "The server stops.", type="server_error", retry_after_s=5.0))
            self.release(stream, "the front door stops")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self.store.remove_front(self.inbox.address)
        self._resuming.close()
        self.outbox.close()
