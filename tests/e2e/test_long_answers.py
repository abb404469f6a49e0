"""An answer that needs more than its idle neighbour leaves, on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .server import DEMOS, complete, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NEW = 1800
"""Tokens whose KV takes 7 MiB; 4 MiB are free while both models are there."""


def test_an_idle_neighbour_gives_way_to_a_long_answer(demo_models: Path, tmp_path: Path) -> None:
    """However much of its neighbours' KV it gets: only their weights are enough."""
    catalog = {
        "devices": [{"id": "host:0", "memory": "32MiB"}],
        "defaults": {"min_kv_memory": "2MiB", "engine_args": {"dtype": "float32"}},
        "models": [{"name": name, "path": str(demo_models / name)} for name in (DEMOS[0], DEMOS[2])],
        "policy": {"min_kv_tokens": 256},
    }
    server = start(tmp_path, catalog)
    try:
        for name in (DEMOS[0], DEMOS[2]):  # both are there before the long answer is asked for
            complete(server.client, name, "hello", 4)
        made = server.client.completions.create(
            model=DEMOS[0], prompt="hello", max_tokens=NEW, extra_body={"ignore_eos": True}
        )
        assert made.usage is not None and made.usage.completion_tokens == NEW
        logs = [line for file in server.state.rglob("decisions*.jsonl") for line in file.read_text().splitlines()]
        left = [d["reason"]["code"] for d in map(json.loads, logs) if d["do"] == "Deactivate"]
        assert left == ["kv_pressure"]
    finally:
        server.stop()
