"""A model that leaves by itself, on a real server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import BRIEF, KEEP_S
from .server import DEMOS, Server, complete, until

pytestmark = pytest.mark.engine
QWEN = DEMOS[1]


@pytest.mark.slow
def test_a_model_leaves_when_it_has_been_idle_for_its_keep_alive(peculiar: Server) -> None:
    def reasons() -> list[dict[str, Any]]:
        """For its leaving: a model that came a moment ago may not be shown yet, as one that has left is not."""
        logs = [line for file in peculiar.state.rglob("decisions*.jsonl") for line in file.read_text().splitlines()]
        left = (d for d in map(json.loads, logs) if d["do"] == "Deactivate" and d["model"] == BRIEF)
        return [d["reason"] for d in left]

    for count in range(1, 4):
        complete(peculiar.client, BRIEF, "hello", 4)
        until(lambda n=count: len(reasons()) == n, f"its leaving, for time {count}")  # type: ignore[misc]
        peculiar.wait_unloaded(BRIEF)
    assert [r["code"] for r in reasons()] == ["keep_alive"] * 3
    assert all(r["idle_s"] >= KEEP_S - 0.001 for r in reasons())


def test_what_was_loaded_is_shown_with_its_weights_at_once(peculiar: Server) -> None:
    if peculiar.replicas(QWEN):
        peculiar.admin(f"models/{QWEN}/unload", {})
        peculiar.wait_unloaded(QWEN)
    peculiar.admin(f"models/{QWEN}/load", {})
    [model] = [m for m in peculiar.admin("models")["models"] if m["name"] == QWEN]
    assert [r["weight_bytes"] > 0 for r in model["replicas"]] == [True]
