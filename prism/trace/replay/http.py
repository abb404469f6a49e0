"""A lean HTTP/1.1 client for many concurrent streams: raw asyncio protocols, httptools for parsing, keep-alive reuse.

Measured against aiohttp and httpx in ``benchmarks/trace/client_choice.py``; a general client spends several times as
much on a stream as the stream's own work, and at thousands of requests a second that is what limits the sender.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from prism.core.errors import InvalidValue


class Exchange(Protocol):
    """What a request wants to know of its response. Exactly one of ``on_end`` and ``on_failure`` is called, last."""

    def on_status(self, status: int) -> None: ...

    def on_body(self, piece: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_failure(self, kind: str, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address, from its base URL."""

    host: str
    port: int
    tls: bool
    base_path: str

    @classmethod
    def of(cls, url: str) -> Target:
        """Raises :class:`InvalidValue` for anything but ``http[s]://host[:port][/path]``."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidValue("url", url, "must be http[s]://host[:port][/path]")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path.removesuffix("/v1"))

    @property
    def host_header(self) -> str:
        return f"{self.host}:{self.port}"


class HttpPool:
    """Connections to one server. A request takes an idle one or opens another, up to ``most``."""

    def __init__(self, target: Target, most: int) -> None:
        self._target = target
        self._most = most
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._opening: dict[asyncio.Task[None], Exchange] = {}
        self._given_up: dict[asyncio.Task[None] | None, tuple[str, str]] = {}
        self._tls = ssl.create_default_context() if target.tls else None
        self.opened = 0

    def send(self, data: bytes, exchange: Exchange) -> None:
        """Send the request ``data`` (complete with headers); the exchange hears what comes of it."""
        while self._idle:
            connection = self._idle.pop()
            if connection.start(data, exchange, reused=True):
                return
        self._open_for(data, exchange)

    def _open_for(self, data: bytes, exchange: Exchange) -> None:
        if len(self._open) + len(self._opening) >= self._most:
            exchange.on_failure("client_limit", f"all {self._most} connections are in use")
            return
        task = asyncio.get_running_loop().create_task(self._connect(data, exchange))
        self._opening[task] = exchange
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[None]) -> None:
        del self._opening[task]
        self._given_up.pop(task, None)

    async def _connect(self, data: bytes, exchange: Exchange) -> None:
        loop, target = asyncio.get_running_loop(), self._target
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._idle.append, self._open.discard, self._open_for),
                target.host,
                target.port,
                ssl=self._tls,
            )
        except OSError as exc:
            exchange.on_failure("connect", str(exc))
            return
        except asyncio.CancelledError:
            exchange.on_failure(*self._given_up.get(asyncio.current_task(), ("cancelled", "the client stopped")))
            raise
        self.opened += 1
        self._open.add(connection)
        if not connection.start(data, exchange):
            self._open.discard(connection)
            exchange.on_failure("disconnect", "the server closed the new connection")

    def cancel(self, exchange: Exchange, kind: str, detail: str) -> None:
        """Close the connection that carries ``exchange``, or give up opening it. It hears of a failure, ``kind``."""
        for connection in self._open:
            if connection.exchange is exchange:
                connection.fail(kind, detail)
                return
        for task, waiting in self._opening.items():
            if waiting is exchange:
                self._given_up[task] = (kind, detail)
                task.cancel()
                return

    def close(self) -> None:
        """Close all connections; exchanges under way fail."""
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._open):
            connection.fail("cancelled", "the client stopped")


class _Connection(asyncio.Protocol):
    """One keep-alive connection with at most one exchange at a time. Also the parser's callbacks."""

    def __init__(
        self,
        on_idle: Callable[[_Connection], None],
        on_gone: Callable[[_Connection], None],
        send_again: Callable[[bytes, Exchange], None],
    ) -> None:
        self._on_idle, self._on_gone, self._send_again = on_idle, on_gone, send_again
        self._unanswered: bytes | None = None
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self.exchange: Exchange | None = None

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.fail("protocol", "the server sent data without being asked")
            return
        self._unanswered = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self.fail("protocol", f"not HTTP: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        data, exchange = self._unanswered, self.exchange
        if data is not None and exchange is not None:  # the server had closed the idle connection: not a failure
            self.exchange = self._unanswered = None
            self._on_gone(self)
            self._send_again(data, exchange)
            return
        self.fail("disconnect", str(exc) if exc else "the server closed the connection")

    # --- requests ---

    def start(self, data: bytes, exchange: Exchange, reused: bool = False) -> bool:
        """Begin ``exchange``; False when the connection is gone. On a ``reused`` connection that the server closes
        without a byte of answer, the request is sent again on a new one."""
        if self._transport is None or self._transport.is_closing():
            return False
        self.exchange, self._unanswered = exchange, data if reused else None
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)
        return True

    def fail(self, kind: str, detail: str) -> None:
        """End the exchange, if any, and the connection."""
        exchange, self.exchange, self._parser = self.exchange, None, None
        self._on_gone(self)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if exchange is not None:
            exchange.on_failure(kind, detail)

    # --- httptools callbacks ---

    def on_headers_complete(self) -> None:
        if self.exchange is not None and self._parser is not None:
            self.exchange.on_status(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self.exchange is not None:
            self.exchange.on_body(body)

    def on_message_complete(self) -> None:
        exchange, parser = self.exchange, self._parser
        if exchange is None or parser is None:
            return
        self.exchange = None
        keep = parser.should_keep_alive()
        if keep and self._transport is not None and not self._transport.is_closing():
            self._on_idle(self)
        exchange.on_end()
        if not keep:
            self.fail("", "")
