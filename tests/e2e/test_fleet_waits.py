"""Tests and benchmarks that start a fleet end with what a machine said when it cannot start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e import fleet
from tests.e2e.fleet import Fleet, Host


@pytest.mark.parametrize("comes", [(), ("fleet.secret",)])
def test_a_server_that_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, comes: tuple[str, ...]
) -> None:
    """Its secret, or its store, was waited for until patience ran out; why was in a file that nobody read."""
    (tmp_path / "local").mkdir()
    for name in comes:
        (tmp_path / "local" / name).touch()
    monkeypatch.setattr(fleet, "PRISM", [sys.executable, "-c", "raise SystemExit('no core')"])
    with pytest.raises(AssertionError, match="no core"):
        Fleet(tmp_path, [Host()]).begin_serving({})
