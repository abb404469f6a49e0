"""The state directory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from prism.cli import node, serve
from prism.config.state import StateDir, StateError


def test_admin_key_is_made_once_and_private(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path / "s")
    state.create()
    key = state.admin_key()
    assert len(key) > 24
    assert state.admin_key() == key
    assert state.admin_key_file.stat().st_mode & 0o777 == 0o600
    assert state.root.stat().st_mode & 0o777 == 0o700


def test_all_who_make_the_admin_key_at_once_have_the_same(tmp_path: Path) -> None:
    for attempt in range(20):
        state, together = StateDir.at(tmp_path / str(attempt)), threading.Barrier(4)
        state.create()

        def make(state: StateDir = state, together: threading.Barrier = together) -> str:
            together.wait()
            return state.admin_key()

        with ThreadPoolExecutor(4) as pool:
            keys = {made.result() for made in [pool.submit(make) for _ in range(4)]}
        assert keys == {state.admin_key()} and len(keys.pop()) > 24
        assert [f.name for f in state.root.iterdir() if f.name.startswith("admin")] == ["admin.key"]


def test_server_file(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path)
    assert state.read_server() is None
    state.write_server("http://127.0.0.1:1", Path("/c.yaml"), 5.0)
    found = state.read_server()
    assert found is not None and found["url"] == "http://127.0.0.1:1"
    state.withdraw_server()
    assert state.read_server() is None, "what this process wrote"
    state.server_file.write_text(json.dumps({"url": "http://127.0.0.1:2", "pid": 1}))
    state.withdraw_server()
    assert state.read_server() is not None, "another process' file stays"
    state.server_file.write_text("[]")
    assert state.read_server() is None
    state.server_file.write_text("{")
    assert state.read_server() is None


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be made"):
        StateDir.at(tmp_path / "file" / "below").create()


@pytest.fixture
def used(tmp_path: Path) -> Iterator[StateDir]:
    """A state directory with a running server, and what it wrote there."""
    state = StateDir.at(tmp_path / "s")
    state.create()
    with state.take():
        state.write_server("http://127.0.0.1:1", Path("/c.yaml"), 5.0)
        (state.run / "metrics").mkdir()
        (state.run / "metrics" / "counter_1.db").write_bytes(b"counts")
        state.fleet_secret_file.write_text("the running machine's secret")
        (state.logs / "serve.jsonl").write_text("{}\n")
        yield state


def files(state: StateDir) -> dict[str, bytes]:
    return {str(f.relative_to(state.root)): f.read_bytes() for f in state.root.rglob("*") if f.is_file()}


@pytest.mark.parametrize("program", ["serve", "node"])
def test_a_second_server_is_refused_and_changes_nothing(
    used: StateDir, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = tmp_path / "c.yaml"
    catalog.write_text("models: [{name: a, path: org/a}]\n")
    monkeypatch.setenv("PRISM_FLEET_SECRET", "another secret that is long enough")
    before = files(used)
    at = ["--state-dir", str(used.root)]
    if program == "serve":
        done = CliRunner().invoke(serve.command, [str(catalog), *at])
    else:
        done = CliRunner().invoke(node.command, ["--redis-url", "redis://127.0.0.1:1", "--name", "n", *at])
    assert isinstance(done.exception, StateError), done.output
    assert "another server uses the state directory" in str(done.exception)
    assert files(used) == before
