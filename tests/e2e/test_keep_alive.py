"""A model that leaves by itself, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import DEMOS, Server, catalog, complete, start

pytestmark = pytest.mark.engine
LLAMA, QWEN, _ = DEMOS
KEEP_S = 2.0


@pytest.fixture(scope="module")
def server(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = catalog(demo_models)
    next(m for m in config["models"] if m["name"] == LLAMA)["keep_alive"] = f"{KEEP_S:g}s"
    server = start(tmp_path_factory.mktemp("k"), config)
    yield server
    server.stop()


def test_a_model_leaves_when_it_has_been_idle_for_its_keep_alive(server: Server) -> None:
    for _ in range(3):
        complete(server.client, LLAMA, "hello", 4)
        server.wait_unloaded(LLAMA)
    logs = [line for file in server.state.rglob("decisions*.jsonl") for line in file.read_text().splitlines()]
    reasons = [d["reason"] for d in map(json.loads, logs) if d["do"] == "Deactivate" and d["model"] == LLAMA]
    assert [r["code"] for r in reasons] == ["keep_alive"] * 3
    assert all(r["idle_s"] >= KEEP_S - 0.001 for r in reasons)


def test_what_was_loaded_is_shown_with_its_weights_at_once(server: Server) -> None:
    server.admin(f"models/{QWEN}/load", {})
    [model] = [m for m in server.admin("models")["models"] if m["name"] == QWEN]
    assert [r["weight_bytes"] > 0 for r in model["replicas"]] == [True]
