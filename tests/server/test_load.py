"""Many requests at once: all are answered, none twice, nothing is left."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections import Counter

import pytest

from prism.engine.fake_payload import fake_tokens
from tests.patience import until
from tests.server.conftest import LETTERS
from tests.server.live import LiveFront
from tests.server.test_streams import nothing_left


async def _connect(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A full backlog refuses for a moment; a client tries again. asyncio's own connect takes that answer of a Unix
    socket (EAGAIN: not connected) for a connection on its way, and then writes to nobody."""
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    while True:
        try:
            client.connect(path)
            return await asyncio.open_unix_connection(sock=client, limit=1 << 20)
        except (BlockingIOError, ConnectionRefusedError):
            await asyncio.sleep(0.05)


async def _ask(live: LiveFront, index: int, seen: Counter[bytes]) -> None:
    """One request on its own connection, by hand: client libraries take longer than the server with so many."""
    prompt, stream = (index % 97, index % 89, 7), index % 3 == 0
    body = json.dumps({"model": "fast", "prompt": prompt, "max_tokens": 4, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: prism\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await _connect(live.socket)
    writer.write(head.encode() + body)
    answer = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
    assert bytes(fake_tokens(prompt, 0, 4, LETTERS)) in answer
    assert not stream or b"data: [DONE]" in answer
    at = answer.index(b"x-request-id: ")
    seen[answer[at : at + 50]] += 1


async def _burst(live: LiveFront, count: int) -> None:
    seen: Counter[bytes] = Counter()
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(_ask(live, index, seen))
    assert len(seen) == count and set(seen.values()) == {1}
    await asyncio.to_thread(until, lambda: nothing_left(live), "the queues are empty")


async def test_five_hundred_at_once(live: LiveFront) -> None:
    await _burst(live, 500)


@pytest.mark.slow
async def test_ten_thousand_at_once(live: LiveFront) -> None:
    """Both ends live in this process: where it may not have 20,000 sockets and some, as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    try:
        await _burst(live, min(10_000, (hard - 500) // 2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
