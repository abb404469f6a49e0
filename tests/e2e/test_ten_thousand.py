"""10,000 requests at once through two front doors, Valkey and real engines: each ends with its full answer or is told
to come back later, and the server is as it was before."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .server import DEMOS, Server, catalog, complete, greedy, start, until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT = 10_000
MAX_QUEUE = 2_000
TOKENS = 3
PER_REQUEST_BYTES = 64 << 10
STORE_CONNECTIONS = 100
"""A front door keeps up to 64 connections to the store."""
PROMPTS = [(model, prompt) for model in DEMOS for prompt in ("one", "two words", "now three words")]


@pytest.fixture
def server(demo_models: Path, tmp_path: Path) -> Iterator[Server]:
    config = catalog(demo_models, late="serve")
    config["server"]["max_queue"] = MAX_QUEUE
    server = start(tmp_path, config)
    yield server
    server.stop()


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < COUNT + 1_000:
        pytest.skip(f"{COUNT} connections need as many open files, this user may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask(server: Server, index: int, expected: list[str], ends: Counter[str]) -> None:
    """One request on its own connection, by hand: a client library would be slower than the server."""
    model, prompt = PROMPTS[index % len(PROMPTS)]
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": index % 2 == 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: prism\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    port = int(server.url.rpartition(":")[2])
    source = (f"127.0.0.{2 + index % 8}", 0)  # one address has too few ports for many runs in a row
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source, limit=1 << 20)
    writer.write(head.encode() + data)
    answer = await reader.read(-1)
    writer.close()
    top, _, rest = answer.decode().partition("\r\n\r\n")
    status = top.split(" ", 2)[1]
    ends[status] += 1
    if status == "200":
        assert text(rest, stream=index % 2 == 0) == expected[index % len(PROMPTS)]
    else:
        assert status == "429" and "retry-after: " in top.lower(), answer[:500]
        assert json.loads(rest)["error"]["code"] == "queue_full"


def text(body: str, *, stream: bool) -> str:
    """What an answer says; it must be whole."""
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", body
    return "".join(c["text"] for line in lines[:-1] for c in json.loads(line)["choices"])


async def watch(fronts: list[psutil.Process], peak: dict[int, int]) -> None:
    while True:
        for front in fronts:
            peak[front.pid] = max(peak.get(front.pid, 0), front.memory_info().rss)
        await asyncio.sleep(0.1)


async def test_ten_thousand_at_once(server: Server, demo_models: Path, many_files: None) -> None:
    expected = [greedy(str(demo_models / model), prompt, TOKENS) for model, prompt in PROMPTS]
    for model, prompt in PROMPTS:
        await asyncio.to_thread(complete, server.client, model, prompt, TOKENS)
    fronts = [psutil.Process(server.named(f"front-{i}")) for i in range(2)]
    before = {p.pid: (p.memory_info().rss, p.num_fds()) for p in fronts}
    peak: dict[int, int] = {}
    ends: Counter[str] = Counter()
    watching = asyncio.create_task(watch(fronts, peak))
    async with asyncio.TaskGroup() as group:
        for index in range(COUNT):
            group.create_task(ask(server, index, expected, ends))
    watching.cancel()
    grown = {pid: (peak[pid] - before[pid][0]) >> 20 for pid in peak}
    print(f"{dict(ends)}; the front doors grew by {list(grown.values())} MiB at most")
    assert ends.total() == COUNT and set(ends) == {"200", "429"}
    assert ends["200"] >= MAX_QUEUE
    assert sum(grown.values()) << 20 < COUNT * PER_REQUEST_BYTES, "a waiting or refused request costs little"
    until(lambda: all(p.num_fds() < before[p.pid][1] + STORE_CONNECTIONS for p in fronts), "all being closed")
    until(lambda: not server.admin("requests")["requests"], "no request being open")
    for model, prompt in PROMPTS:
        again = await asyncio.to_thread(complete, server.client, model, prompt, TOKENS)
        assert again == greedy(str(demo_models / model), prompt, TOKENS)
