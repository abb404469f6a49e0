"""Whose a pool's folder is, and how it goes."""

from __future__ import annotations

from pathlib import Path

from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import claim_host_pool, drop_host_pool, host_pool_directory
from tests.kv.test_host_pool import KIB, SPACE, pieces, put, read


def test_a_pool_that_is_dropped_takes_nothing_and_harms_nobody(tmp_path: Path) -> None:
    accounts = tmp_path / "accounts"
    accounts.mkdir()
    pool = HostPool(claim_host_pool(accounts, tmp_path), 4 * KIB)
    a, b = pieces(2)
    put(pool, a)
    drop_host_pool(accounts, tmp_path)
    assert not host_pool_directory(accounts, tmp_path).exists()
    assert read(pool, a) is None and not pool.has(SPACE, a)
    assert not put(pool, b)


def test_pools_of_states_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone, here = tmp_path / "gone", tmp_path / "here"
    for accounts in (gone, here):
        accounts.mkdir()
        claim_host_pool(accounts, tmp_path)
    gone.rmdir()
    claim_host_pool(here, tmp_path)
    assert not host_pool_directory(gone, tmp_path).exists() and host_pool_directory(here, tmp_path).exists()
