"""LoRA adapters through the whole server: named like models, merged nowhere, equal to what merging gives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from scripts.make_demo_adapter import make_adapter
from tests.engine.adapters import merged

from .server import HTTP, Server, complete, greedy, prompts, start, stream, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BASE = "demo-llama"
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def folder(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters over the base, and the base merged with each."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate((*NAMES, "four")):
        make_adapter(demo_models / BASE, folder / name, seed=seed, rank=4)
        merged(demo_models / BASE, folder / name, folder / f"{name}-merged")
    return folder


def catalog(models: Path, folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    base = {"name": BASE, "path": str(models / BASE), "lora": {"slots": 2}, "engine_args": {"dtype": "float32"}}
    return {
        "devices": [{"id": "host:0", "memory": "64MiB"}, {"id": "host:1", "memory": "64MiB"}],
        "models": [base, *({"name": n, "base": BASE, "adapter": str(folder / n)} for n in names)],
    }


@pytest.fixture(scope="module")
def server(demo_models: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(tmp_path_factory.mktemp("s"), catalog(demo_models, folder, NAMES))
    yield server
    server.stop()


async def test_many_at_once_equal_their_merged_models(server: Server, demo_models: Path, folder: Path) -> None:
    asks = [(name, prompt) for prompt in prompts(5) for name in (BASE, *NAMES)]
    async with server.async_client() as client:
        answers = await asyncio.gather(*(stream(client, model, prompt, 20) for model, prompt in asks))
    for (name, prompt), answer in zip(asks, answers, strict=True):
        path = demo_models / BASE if name == BASE else folder / f"{name}-merged"
        assert answer == greedy(str(path), prompt, 20), name


def test_an_adapter_leaves_alone_and_comes_back_to_another_device(
    server: Server, demo_models: Path, folder: Path
) -> None:
    prompt = prompts(7)[6]
    for device in ("local/host:0", "local/host:1"):
        server.admin(f"models/{BASE}/unload", {})
        server.wait_unloaded(BASE)
        server.admin("models/one/load", {"devices": [device]})
        assert complete(server.client, "one", prompt, 16) == greedy(str(folder / "one-merged"), prompt, 16)
        until(lambda: server.admin("models/one")["resident"] == [device], "being resident")  # noqa: B023
        server.admin("models/one/unload", {})
        until(lambda: server.admin("models/one")["resident"] == [], "having left")
        assert [r["devices"] for r in server.replicas(BASE)] == [[device]], "its base stays"


def test_a_reload_adds_and_removes_adapters(server: Server, demo_models: Path, folder: Path) -> None:
    prompt = prompts(8)[7]
    file = server.output.parent / "catalog.yaml"
    assert complete(server.client, "three", prompt, 8)
    file.write_text(json.dumps(catalog(demo_models, folder, ("one", "two", "four"))))
    server.admin("reload", {})
    assert complete(server.client, "four", prompt, 16) == greedy(str(folder / "four-merged"), prompt, 16)
    with pytest.raises(openai.NotFoundError):
        complete(server.client, "three", prompt, 8)
    metrics = HTTP.get(f"{server.url}/metrics").text
    assert 'model="four"' in metrics
