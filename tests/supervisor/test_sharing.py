"""Two servers on one store: the second is refused, whoever started it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.config.catalog import load_catalog
from prism.config.state import StateDir
from prism.store.connect import open_store
from prism.store.embedded import EmbeddedServer
from prism.store.memory import MemoryStore
from prism.supervisor import sharing
from prism.supervisor.machine import Machine, Options
from prism.supervisor.sharing import STATUS, StoreInUse, check_alone, signed
from tests.patience import PATIENCE_S, free_port

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


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a unix socket path has 107 bytes at most."""
    folder = Path(tempfile.mkdtemp(prefix="prism-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.redis
async def test_a_second_server_on_one_redis_starts_nothing(folder: Path) -> None:
    (folder / "c.yaml").write_text("devices: [{id: host:0, memory: 8MiB}]\nmodels: [{name: a, path: org/a}]\n")
    redis = EmbeddedServer(folder / "redis")
    redis.start(PATIENCE_S)
    store, state = open_store(redis.url), StateDir.at(folder / "second")
    state.create()
    await store.put_doc(STATUS, signed(RUNNING, StateDir.at(folder / "first")))
    options = Options("127.0.0.1", free_port(), state, redis.url, "info", 1, state.fleet_secret_file)
    machine = Machine(load_catalog(folder / "c.yaml"), options, lambda text: None)
    with pytest.raises(StoreInUse, match="is used by the server at"):
        await machine.start()
    assert machine.children == []
    await machine.stop()
    await store.aclose()
    redis.stop()
