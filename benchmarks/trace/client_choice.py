"""Which HTTP client can the replayer afford?

    python -m benchmarks.trace.client_choice [--requests 3000] [--tokens 16]

The same streaming requests to the same null server, 64 at a time, read to the end with the same bookkeeping of tokens
(:class:`prism.trace.replay.answer.Answer`) by httpx, aiohttp and Prism's own client, each on one core. What counts is
the CPU time per request: it bounds the rate that one core can send on time.

Result: see docs/results/replay.md.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from collections.abc import Awaitable, Callable
from time import perf_counter

import aiohttp
import httpx
import msgspec
import uvloop

from benchmarks.trace.null import null_server
from prism.trace.replay.answer import Answer
from prism.trace.replay.http import HttpPool, Target

CONCURRENT = 64
One = Callable[[bytes], Awaitable[Answer]]


def body(tokens: int) -> bytes:
    asked = {"model": "m", "prompt": " word" * 200, "max_tokens": tokens, "stream": True}
    return msgspec.json.encode(asked)


async def drive(one: One, count: int, tokens: int) -> tuple[float, float]:
    """``(requests/s, CPU seconds per request)`` of ``one`` called ``count`` times, 64 at a time."""
    left, data = count, body(tokens)

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            answer = await one(data)
            assert answer.events == tokens, answer.error

    before, began_s = _cpu_s(), perf_counter()
    await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
    return count / (perf_counter() - began_s), (_cpu_s() - before) / count


async def with_httpx(url: str, count: int, tokens: int) -> tuple[float, float]:
    limits = httpx.Limits(max_connections=CONCURRENT, max_keepalive_connections=CONCURRENT)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def one(data: bytes) -> Answer:
            answer = Answer()
            async with client.stream("POST", f"{url}/v1/completions", content=data) as reply:
                async for piece in reply.aiter_raw():
                    answer.feed(piece, perf_counter())
            return answer

        return await drive(one, count, tokens)


async def with_aiohttp(url: str, count: int, tokens: int) -> tuple[float, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENT)) as client:

        async def one(data: bytes) -> Answer:
            answer = Answer()
            async with client.post(f"{url}/v1/completions", data=data) as reply:
                async for piece in reply.content.iter_any():
                    answer.feed(piece, perf_counter())
            return answer

        return await drive(one, count, tokens)


class _Waiting:
    """An exchange that ends a future."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_status(self, status: int) -> None:
        pass

    def on_body(self, piece: bytes) -> None:
        self.answer.feed(piece, perf_counter())

    def on_end(self) -> None:
        self.done.set_result(self.answer)

    def on_failure(self, kind: str, detail: str) -> None:
        self.done.set_exception(RuntimeError(f"{kind}: {detail}"))


async def with_ours(url: str, count: int, tokens: int) -> tuple[float, float]:
    target = Target.of(url)
    pool = HttpPool(target, CONCURRENT)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {target.host_header}\r\nContent-Type: application/json\r\n"

    async def one(data: bytes) -> Answer:
        exchange = _Waiting()
        pool.send(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, exchange)
        return await exchange.done

    try:
        return await drive(one, count, tokens)
    finally:
        pool.close()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the table: three rounds in turn, the best of each."""
    parser = argparse.ArgumentParser(description="CPU time per streamed answer of three HTTP clients.")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    clients = {"httpx": with_httpx, "aiohttp": with_aiohttp, "prism (asyncio + httptools)": with_ours}
    best: dict[str, tuple[float, float]] = {}
    with null_server(5.0, 2.0) as url:
        for _ in range(3):
            for name, client in clients.items():
                found = uvloop.run(client(url, options.requests, options.tokens))
                best[name] = min(best.get(name, found), found, key=lambda pair: pair[1])
    least = best["prism (asyncio + httptools)"][1]
    print("| client | requests/s, 64 at a time | CPU per request | relative |\n|---|---|---|---|")
    for name, (rate, cpu_s) in best.items():
        print(f"| {name} | {rate:,.0f} | {1e6 * cpu_s:.0f} us | {cpu_s / least:.1f}x |")


if __name__ == "__main__":
    main()
