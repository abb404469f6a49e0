"""A store's budget stands in the store."""

from __future__ import annotations

from pathlib import Path

import psutil

from prism.weights.store.budget import Budget, read_budget, share_of_memory, write_budget
from prism.weights.store.weight_store import WeightStore


def test_stores_keep_to_the_budget_they_find(tmp_path: Path) -> None:
    assert read_budget(tmp_path) == Budget()
    write_budget(tmp_path, Budget(disk_bytes=1000, host_bytes=500))
    store = WeightStore(tmp_path, host_directory=tmp_path / "shm")
    assert (store.budget_bytes, store.host_budget_bytes) == (1000, 500)
    own = WeightStore(tmp_path, 7, host_directory=tmp_path / "shm", host_budget_bytes=8)
    assert (own.budget_bytes, own.host_budget_bytes) == (7, 8)
    assert not store.ls(), "the budget's file is no pack"


def test_a_share_of_memory_fits_into_shared_memory() -> None:
    total = psutil.virtual_memory().total
    assert 0 < share_of_memory(0.01) <= total // 100
    assert share_of_memory(1.0) <= total
