"""The state directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.config.state import StateDir, StateError


def test_admin_key_is_made_once_and_private(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path / "s")
    state.create()
    key = state.admin_key()
    assert len(key) > 24
    assert state.admin_key() == key
    assert state.admin_key_file.stat().st_mode & 0o777 == 0o600
    assert state.root.stat().st_mode & 0o777 == 0o700


def test_server_file(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path)
    assert state.read_server() is None
    state.write_server("http://127.0.0.1:1", Path("/c.yaml"), 5.0)
    found = state.read_server()
    assert found is not None and found["url"] == "http://127.0.0.1:1"
    state.server_file.write_text("[]")
    assert state.read_server() is None
    state.server_file.write_text("{")
    assert state.read_server() is None


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be made"):
        StateDir.at(tmp_path / "file" / "below").create()
