"""What an engine keeps it gets back, it alone or another one with the same weights, as far as that is worth it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.kv.opening import open_keeper
from prism.kv.settings import DeclaredLinks, KvSettings, read_kv_settings, write_kv_settings
from prism.memory.rows import RowNumbers
from tests.kv.rows import ArrayRows
from tests.kv.stored import forget, spoil, stored

TOKENS = np.random.default_rng(9).integers(0, 1000, 300)
SLOW = 1.0
"""Tokens a second: moving is always worth it."""


def keeper(
    directory: Path, rows: ArrayRows, weights: str = "w", prefill: float = SLOW, bound: int = 1 << 24
) -> KvKeeper:
    made = KvKeeper(HostPool(directory, bound), weights, prefill)
    made.attach(rows)
    return made


def slots(count: int, seed: int) -> RowNumbers:
    return np.random.default_rng(seed).permutation(1000)[:count]


def test_a_sequence_comes_back_in_another_engine(tmp_path: Path) -> None:
    one, two = ArrayRows(seed=1), ArrayRows(seed=2)
    there, here = slots(300, 1), slots(230, 2)
    assert keeper(tmp_path, one).keep(TOKENS, there, "", 0, 60.0) == 5
    other = keeper(tmp_path, two)
    assert other.reach(TOKENS, "", 70) == 300
    assert other.fetch(TOKENS, "", 70, 300, here) == 300
    assert two.at(here) == one.at(there[70:]) and other.fetched_tokens == 230


def test_as_far_as_tokens_are_the_same(tmp_path: Path) -> None:
    kept = keeper(tmp_path, ArrayRows())
    kept.keep(TOKENS[:150], slots(150, 1), "", 0, 60.0)
    assert kept.reach(TOKENS, "", 0) == 150, "a longer sequence ends in the short piece"
    assert kept.reach(TOKENS[:149], "", 0) == 128
    assert kept.reach(np.concatenate([TOKENS[:100], TOKENS]), "", 0) == 64
    assert kept.reach(TOKENS, "", 150) == 150 == kept.reach(TOKENS[:150], "", 140)
    assert kept.reach(TOKENS, "an adapter", 0) == 0
    assert keeper(tmp_path, ArrayRows(), weights="others").reach(TOKENS, "", 0) == 0
    assert keeper(tmp_path, ArrayRows((24, 24))).reach(TOKENS, "", 0) == 0


def test_later_pieces_are_kept_without_those_before(tmp_path: Path) -> None:
    kept = keeper(tmp_path, ArrayRows())
    assert kept.keep(TOKENS, slots(300, 1), "", 200, 60.0) == 2
    assert kept.reach(TOKENS, "", 0) == 0 and kept.reach(TOKENS, "", 192) == 300 == kept.reach(TOKENS, "", 250)


def test_what_is_computed_sooner_is_not_brought(tmp_path: Path) -> None:
    keeper(tmp_path, ArrayRows()).keep(TOKENS, slots(300, 1), "", 0, 60.0)
    fast = keeper(tmp_path, ArrayRows(), prefill=1e9)
    assert fast.reach(TOKENS, "", 0) == 0 and not fast.keep_is_worth(300)
    fast.note_prefill(1000, 1000.0)
    assert fast.reach(TOKENS, "", 0) == 300 and fast.keep_is_worth(300)


def test_a_corrupt_piece_is_dropped_and_what_is_before_it_comes(tmp_path: Path) -> None:
    one, two = ArrayRows(seed=1), ArrayRows(seed=2)
    there = slots(300, 1)
    keeper(tmp_path, one).keep(TOKENS, there, "", 0, 60.0)
    pool = HostPool(tmp_path, 1 << 24)
    (broken,) = stored(pool, 2)
    spoil(pool, broken)
    other = keeper(tmp_path, two)
    assert other.fetch(TOKENS, "", 0, 300, there) == 128 and other.corrupt_pieces == 1
    assert two.at(there[:128]) == one.at(there[:128]) and not stored(pool, 2)
    assert other.reach(TOKENS, "", 0) == 128


def test_pieces_that_are_gone_meanwhile_are_computed(tmp_path: Path) -> None:
    kept = keeper(tmp_path, ArrayRows())
    kept.keep(TOKENS, slots(300, 1), "", 0, 60.0)
    end = kept.reach(TOKENS, "", 0)
    pool = HostPool(tmp_path, 1 << 24)
    forget(pool, stored(pool, 1)[0])
    assert kept.fetch(TOKENS, "", 0, end, slots(300, 2)) == 64


def test_a_full_pool_takes_the_beginning(tmp_path: Path) -> None:
    kept = keeper(tmp_path, ArrayRows(), bound=2 * (4096 + 64 * 48))
    assert kept.keep(TOKENS, slots(300, 1), "", 0, 0.0) == 0, "no time"
    kept.keep(TOKENS[:128], slots(128, 1), "", 0, 60.0)
    assert kept.reach(TOKENS, "", 0) == 128


@pytest.mark.parametrize(
    ("settings", "weights"), [(None, "w"), (KvSettings(), "w"), (KvSettings(host_bytes=1 << 20), "")]
)
def test_nothing_is_kept_without_a_bound_or_for_weights_without_a_name(
    tmp_path: Path, settings: KvSettings | None, weights: str
) -> None:
    if settings is not None:
        write_kv_settings(tmp_path, settings)
    assert open_keeper(tmp_path, "host:0", "worker", weights, 1 << 20) is None


def test_settings_are_read_as_written(tmp_path: Path) -> None:
    settings = KvSettings(host_bytes=1 << 20, links={"host:1": DeclaredLinks(host=1e9)})
    write_kv_settings(tmp_path / "accounts", settings)
    assert read_kv_settings(tmp_path / "accounts") == settings


def test_what_is_kept_soon_is_what_was_there(tmp_path: Path) -> None:
    """The rows are given to others at once; the pieces are found at once, and whole."""
    rows = ArrayRows((48, 16), seed=1)
    there = slots(300, 1)
    kept = keeper(tmp_path, rows)
    before = rows.at(there)
    kept.keep_soon(TOKENS, there, "", 0)
    for data in rows.data:
        data[:] = 0
    assert kept.reach(TOKENS, "", 0) == 300 == kept.fetch(TOKENS, "", 0, 300, there)
    assert rows.at(there) == before
    kept.keep_soon(TOKENS, there, "", 100)
    kept.close()
    assert kept.stored_pieces == 5 and HostPool(tmp_path, 1 << 24).use().pieces == 5
