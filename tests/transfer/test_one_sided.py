"""The choice of a network for weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from prism.transfer.one_sided_networks import find_networks


def test_without_a_fast_network_weights_go_over_tcp(tmp_path: Path) -> None:
    assert find_networks("a", tmp_path / "none") == find_networks("a", tmp_path) == []


def test_without_nixl_a_fast_network_is_reached_over_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    assert find_networks("a", tmp_path) == []
