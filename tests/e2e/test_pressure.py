"""More requests than the device has KV memory for: some give theirs up for a while, idle models give up what they
cache, all answers are right."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from prism import memory
from prism.config.state import StateDir
from tests.patience import happens

from .server import DEMOS, Server, catalog, greedy, prompts, start, stream

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKENS = 250


@pytest.fixture
def server(demo_models: Path, tmp_path: Path) -> Iterator[Server]:
    """One device with room for the weights of two models and little more."""
    config = catalog(demo_models, count=1, memory="32MiB", late="serve", context_length=512)
    server = start(tmp_path, config)
    yield server
    server.stop()


async def test_retracted_requests_go_on_exactly(server: Server, demo_models: Path) -> None:
    asks = [(DEMOS[1 + i % 2], prompt) for i, prompt in enumerate(prompts(12))]
    async with server.async_client() as client:
        answers = await asyncio.gather(*(stream(client, model, prompt, TOKENS) for model, prompt in asks))
    for (model, prompt), answer in zip(asks, answers, strict=True):
        assert answer == greedy(str(demo_models / model), prompt, TOKENS)
    text = (await asyncio.to_thread(httpx.get, f"{server.url}/metrics")).text
    assert re.search(r"^prism_retractions_total{[^}]*} [1-9]", text, re.MULTILINE), "memory was short"


async def test_a_busy_model_with_a_queue_gets_what_an_idle_one_caches(server: Server, demo_models: Path) -> None:
    """Also while it runs something; for its first request alone the other would give up only a part."""
    idle, busy = DEMOS[1], DEMOS[2]
    device = memory.open_device("host:0", account_dir=StateDir(server.state).accounts)

    def kv_pages(owner: int) -> int:
        return sum(o.kv_bytes // device.page_bytes for o in device.stats().owners if o.id == owner)

    given = asyncio.Event()
    asked: list[tuple[str, str, str]] = []

    async with server.async_client() as client:

        async def ask(model: str, prompt: str) -> None:
            asked.append((model, prompt, await stream(client, model, prompt, TOKENS)))

        async def keep_asking(prompt: str) -> None:
            while not given.is_set():
                await ask(busy, prompt)

        await ask(busy, prompts(1)[0])
        await asyncio.gather(*(ask(idle, prompt) for prompt in prompts(4)))
        idle_owner = max(device.stats().owners, key=lambda o: o.weights_bytes).id
        assert kv_pages(idle_owner) > 2, "its prefixes are cached"
        async with asyncio.TaskGroup() as group:
            for prompt in prompts(12):
                group.create_task(keep_asking(prompt))
            await happens(lambda: kv_pages(idle_owner) <= 1, "the idle model giving all but its first block")
            given.set()
        await ask(idle, prompts(1)[0])
    for model, prompt, answer in asked:
        assert answer == greedy(str(demo_models / model), prompt, TOKENS)
