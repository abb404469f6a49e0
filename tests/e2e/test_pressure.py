"""More requests than the device has KV memory for: some give theirs up for a while, all answers are right."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

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
