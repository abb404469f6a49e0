"""A response of server-sent events that keeps a slow start alive and a slow or absent client from costing anything."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from starlette.types import Receive, Scope, Send

from prism.server.errors import ApiError, internal

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(slots=True)
class Timing:
    """Seconds. ``first_s``: how long the status line waits for the first event, so that early errors are plain HTTP
    errors; ``keepalive_s``: longest silence before a comment line; ``write_s``: how long a client may take no byte."""

    first_s: float
    keepalive_s: float
    write_s: float


class ClientGone(Exception):
    """The client disconnected, or read nothing for too long."""


class EventStream:
    """An ASGI response. ``events`` yields whole events; ``comment`` says what stands behind a keep-alive (": ...").

    An error before the first byte is raised by :meth:`start`; one after it is sent as an event ``{"error": ...}`` and
    ends the stream without ``[DONE]``. Raises :class:`ClientGone` from the call when the client left.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        timing: Timing,
        comment: Callable[[], str],
        headers: Mapping[str, str],
        on_error: Callable[[BaseException], ApiError],
    ) -> None:
        self._events, self._timing, self._comment, self._headers = events, timing, comment, headers
        self._on_error = on_error
        self._first: asyncio.Future[str] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._moved_s = 0.0
        self.error: ApiError | None = None
        """The failure that was sent as an event."""

    async def start(self, receive: Receive) -> None:
        """Waits for the first event, up to ``first_s``. Raises what the request failed with, or :class:`ClientGone`."""
        self._first = asyncio.ensure_future(anext(self._events))
        self._gone = asyncio.ensure_future(_disconnect(receive))
        ready = False
        try:
            waiting: set[asyncio.Future[Any]] = {self._first, self._gone}
            await asyncio.wait(waiting, timeout=self._timing.first_s, return_when=asyncio.FIRST_COMPLETED)
            if self._first.done():
                if (error := self._first.exception()) is not None:
                    raise error
            elif self._gone.done():
                raise ClientGone
            ready = True
        finally:
            if not ready:
                await self.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.current_task()
        assert pump is not None
        gone = self._gone or asyncio.ensure_future(_disconnect(receive))
        gone.add_done_callback(lambda task: None if task.cancelled() else pump.cancel("client gone"))
        keeper = asyncio.ensure_future(self._keep_alive(send, pump))
        try:
            await self._pump(send)
        except asyncio.CancelledError:
            if gone.done() or keeper.done():
                pump.uncancel()
                raise ClientGone from None
            raise
        finally:
            gone.cancel()
            keeper.cancel()
            await self.aclose()

    async def _pump(self, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in {**HEADERS, **self._headers}.items()]
        self._moved_s = time.monotonic()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._first is not None and not self._first.done():
            await self._send(send, self._comment())
        try:
            if self._first is not None:
                await self._send(send, await self._first)
            async for event in self._events:
                await self._send(send, event)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except StopAsyncIteration:
            pass
        except Exception as error:
            self.error = self._on_error(error)
            await self._send(send, f"data: {orjson.dumps(self.error.body()).decode()}\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self._moved_s = time.monotonic()

    async def _keep_alive(self, send: Send, pump: asyncio.Task[object]) -> None:
        """Comments in silence; cuts a client off that lets a write stand for ``write_s``."""
        timing = self._timing
        while True:
            silent_s = time.monotonic() - self._moved_s
            await asyncio.sleep(max(0.02, timing.keepalive_s - silent_s))
            if time.monotonic() - self._moved_s < timing.keepalive_s:
                continue
            try:
                async with asyncio.timeout(timing.write_s):
                    await self._send(send, self._comment())
            except TimeoutError:
                pump.cancel("client reads nothing")
                return

    async def aclose(self) -> None:
        """Ends the events; what they wait for is cancelled."""
        if self._gone is not None:
            self._gone.cancel()
        if self._first is not None and not self._first.done():
            self._first.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._first
        await self._events.aclose()  # type: ignore[attr-defined]


async def _disconnect(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


def as_api_error(error: BaseException) -> ApiError:
    """``error`` itself, or an internal error that tells the client nothing."""
    return error if isinstance(error, ApiError) else internal()
