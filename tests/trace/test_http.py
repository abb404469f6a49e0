"""The streaming client against a scripted server on a local socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from prism.core.errors import InvalidValue
from prism.trace.replay.http import HttpPool, Target
from tests.patience import PATIENCE_S, happens

REQUEST = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Heard:
    """An exchange that remembers."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.failure: tuple[str, str] | None = None
        self.ended = asyncio.Event()

    def on_status(self, status: int) -> None:
        self.status = status

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_end(self) -> None:
        assert not self.ended.is_set()
        self.ended.set()

    def on_failure(self, kind: str, detail: str) -> None:
        assert not self.ended.is_set()
        self.failure = (kind, detail)
        self.ended.set()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    """The port of a server run by ``handler`` (once per connection, which is closed at its end). Leave when the client
    has closed its connections: it waits for the end of the server's."""
    talks: set[asyncio.Task[None] | None] = set()

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.add(asyncio.current_task())
        with suppress(ConnectionError):
            await handler(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(handled, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(talk for talk in talks if talk is not None))


async def talk(handler: Handler, requests: int = 1, most: int = 10) -> tuple[list[Heard], HttpPool]:
    """Send ``requests`` one after the other to a server run by ``handler`` (once per connection)."""
    heard = []
    async with serving(handler) as port:
        pool = HttpPool(Target.of(f"http://127.0.0.1:{port}"), most)
        try:
            for _ in range(requests):
                exchange = Heard()
                pool.send(REQUEST, exchange)
                async with asyncio.timeout(PATIENCE_S):
                    await exchange.ended.wait()
                heard.append(exchange)
        finally:
            pool.close()
    return heard, pool


async def test_connections_are_reused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(OK)

    heard, pool = await talk(answer, requests=5)
    assert [h.body for h in heard] == [b"hi"] * 5
    assert pool.opened == 1


async def test_chunked_stream_arrives_in_pieces() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await asyncio.sleep(0.02)
        writer.write(b"2\r\nde\r\n0\r\n\r\n")

    (heard,), _ = await talk(answer)
    assert (heard.status, heard.body, heard.failure) == (200, b"abcde", None)


async def test_connection_close_is_honoured() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"HTTP/1.1 429 Too Many\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")
        writer.close()

    heard, pool = await talk(answer, requests=2)
    assert [(h.status, h.body) for h in heard] == [(429, b"no")] * 2
    assert pool.opened == 2


async def test_an_idle_connection_that_the_server_closed_is_no_failure() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(OK)
        await reader.read(1000)
        writer.close()  # the next request on this connection gets no answer

    heard, pool = await talk(answer, requests=3)
    assert [h.failure for h in heard] == [None] * 3
    assert pool.opened == 3


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "disconnect"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "disconnect"),
        (b"not http at all\r\n\r\n", "protocol"),
    ],
)
async def test_broken_answers_fail_by_kind(data: bytes, kind: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(data)
        writer.close()

    (heard,), _ = await talk(answer)
    assert heard.failure is not None
    assert heard.failure[0] == kind


async def test_nobody_listens() -> None:
    pool, heard = HttpPool(Target.of("http://127.0.0.1:1"), 2), Heard()
    pool.send(REQUEST, heard)
    await heard.ended.wait()
    assert heard.failure is not None
    assert heard.failure[0] == "connect"


async def test_limit_cancel_and_close() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silence) as port:
        pool = HttpPool(Target.of(f"http://127.0.0.1:{port}"), most=2)
        first, second, third = Heard(), Heard(), Heard()
        for exchange in (first, second, third):
            pool.send(REQUEST, exchange)
        assert third.failure == ("client_limit", "all 2 connections are in use")
        await happens(lambda: pool.opened == 2, "both connections")
        pool.cancel(first, "timeout", "too long")
        pool.close()
        assert first.failure == ("timeout", "too long")
        assert second.failure is not None
        assert second.failure[0] == "cancelled"


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://a", "a", 80, ""),
        ("https://a/v1", "a", 443, ""),
        ("http://a:8000/x/v1/", "a", 8000, "/x"),
    ],
)
def test_urls(url: str, host: str, port: int, path: str) -> None:
    target = Target.of(url)
    assert (target.host, target.port, target.base_path) == (host, port, path)


@pytest.mark.parametrize("url", ["a:80", "ftp://a", "http://"])
def test_bad_urls_are_named(url: str) -> None:
    with pytest.raises(InvalidValue, match="url"):
        Target.of(url)
