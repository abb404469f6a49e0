"""Two servers on one store: the second is refused, whoever started it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism.config.state import StateDir
from prism.store.memory import MemoryStore
from prism.supervisor import sharing
from prism.supervisor.sharing import STATUS, StoreInUse, check_alone, signed

RUNNING: dict[str, object] = {"url": "http://127.0.0.1:8000", "pid": 7}
pytestmark = pytest.mark.hostile


async def test_a_store_that_another_server_uses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ours, theirs = MemoryStore(), StateDir.at(tmp_path / "a"), StateDir.at(tmp_path / "b")
    await check_alone(store, ours, "redis://h")
    await store.put_doc(STATUS, signed(RUNNING, theirs))
    with pytest.raises(StoreInUse) as caught:
        await check_alone(store, ours, "redis://h")
    for part in ("redis://h", "http://127.0.0.1:8000", "process 7", str(theirs.root), "/1"):
        assert part in str(caught.value)
    await check_alone(store, theirs, "redis://h")
    monkeypatch.setattr(sharing, "RUNS_S", -1.0)
    await check_alone(store, ours, "redis://h")


async def test_a_status_of_an_older_version_is_no_running_server(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.put_doc(STATUS, json.dumps(RUNNING))
    await check_alone(store, StateDir.at(tmp_path), "redis://h")
