"""Pieces in what other devices lend: within their offer, back when they want it, whole wherever they are."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism import memory
from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.kv.lent_shelf import FreeRanges, Key, Lender, LentShelf, borrower_name, borrower_of
from prism.kv.opening import open_keeper
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from prism.memory.rows import Packed, RowNumbers
from tests.kv.rows import ArrayRows
from tests.kv.stored import stored
from tests.patience import PATIENCE_S

PAGE, PAGES = 64 << 10, 32
TOKENS = np.random.default_rng(9).integers(0, 1000, 640)
ROWS = np.random.default_rng(1).permutation(1000)[:640]


def open_lender(folder: Path, name: str = "host:1", keep_pages: int = 0) -> memory.Device:
    device = memory.open_device(name, PAGES * PAGE, account_dir=folder / "accounts", page_bytes=PAGE)
    device.offer(keep_pages * PAGE)
    return device


def keeper(folder: Path, *devices: memory.Device, seed: int = 1) -> tuple[KvKeeper, ArrayRows]:
    shelf = LentShelf([Lender(device, "borrower", 1e12 / (i + 1)) for i, device in enumerate(devices)])
    rows = ArrayRows((1024, 512), seed=seed)
    made = KvKeeper(pool_of(folder), "w", 1.0, lent=shelf)
    made.attach(rows)
    return made, rows


def pool_of(folder: Path) -> HostPool:
    return HostPool(folder / "pool", 1 << 24)


def lent(device: memory.Device) -> int:
    assert not device.audit().problems
    return sum(owner.lent_bytes for owner in device.stats().owners)


def test_kv_goes_to_the_lender_and_comes_back(tmp_path: Path) -> None:
    lender = open_lender(tmp_path)
    kept, rows = keeper(tmp_path, lender)
    assert kept.keep(TOKENS, ROWS, "", 0, 60.0) == 10
    assert lent(lender) >= 640 * 1536 and not stored(pool_of(tmp_path))
    before = rows.at(ROWS)
    for data in rows.data:
        data[:] = 0
    assert kept.reach(TOKENS, "", 0) == 640
    assert kept.fetch(TOKENS, "", 0, 640, ROWS[::-1].copy()) == 640
    assert rows.at(ROWS[::-1].copy()) == before
    kept.close()
    assert lent(lender) == 0 and not lender.stats().owners
    again, other = keeper(tmp_path, lender, seed=2)
    assert again.fetch(TOKENS, "", 0, 640, ROWS) == 640, "what was lent went to host memory when the model left"
    assert other.at(ROWS) == before


def test_a_lender_that_wants_its_memory_gets_it_at_the_next_step(tmp_path: Path) -> None:
    lender = open_lender(tmp_path, keep_pages=2)
    kept, rows = keeper(tmp_path, lender)
    kept.keep(TOKENS, ROWS, "", 0, 60.0)
    before, held = rows.at(ROWS), lent(lender)
    kept.step()
    assert lent(lender) == held, "nobody wants anything"
    model = lender.register("model")
    assert model.wish(20 * PAGE, 20 * PAGE) == 20 * PAGE
    kept.step()
    model.reserve(20 * PAGE, "kv", yielding=True)
    assert lent(lender) < held and stored(pool_of(tmp_path))
    lender.offer(None)
    kept.step()
    assert lent(lender) == 0
    assert kept.fetch(TOKENS, "", 0, 640, ROWS) == 640 and rows.at(ROWS) == before


def test_what_a_lender_lacks_another_one_has_or_host_memory(tmp_path: Path) -> None:
    fast, slow = open_lender(tmp_path, keep_pages=26), open_lender(tmp_path, "host:2", keep_pages=27)
    kept, _ = keeper(tmp_path, fast, slow)
    assert kept.keep(TOKENS, ROWS, "", 0, 60.0) == 10
    assert 0 < lent(fast) <= 6 * PAGE and 0 < lent(slow) <= 5 * PAGE and stored(pool_of(tmp_path))
    assert kept.reach(TOKENS, "", 0) == 640 == kept.fetch(TOKENS, "", 0, 640, ROWS)
    kept.close()


def test_what_one_lender_wants_back_goes_to_another_that_has_room(tmp_path: Path) -> None:
    fast, slow = open_lender(tmp_path), open_lender(tmp_path, "host:2")
    kept, rows = keeper(tmp_path, fast, slow)
    kept.keep(TOKENS, ROWS, "", 0, 60.0)
    before, held = rows.at(ROWS), lent(fast)
    assert held and not lent(slow)
    fast.offer(None)
    kept.step()
    assert lent(fast) == 0 and lent(slow) == held and not stored(pool_of(tmp_path))
    assert kept.fetch(TOKENS, "", 0, 640, ROWS) == 640 and rows.at(ROWS) == before
    slow.offer(None)
    kept.step()
    assert lent(slow) == 0 and stored(pool_of(tmp_path)), "nobody lends any more"
    assert kept.fetch(TOKENS, "", 0, 640, ROWS) == 640 and rows.at(ROWS) == before
    kept.close()


def test_a_lender_gets_its_memory_back_although_host_memory_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise OSError(5, "no such luck")

    lender = open_lender(tmp_path)
    kept, _ = keeper(tmp_path, lender)
    kept.keep(TOKENS, ROWS, "", 0, 60.0)
    monkeypatch.setattr(HostPool, "put", broken)
    lender.offer(None)
    kept.step()
    assert lent(lender) == 0 and kept.reach(TOKENS, "", 0) == 0
    kept.close()


def test_a_link_is_guessed_to_be_as_fast_as_the_one_that_is_taken_first(tmp_path: Path) -> None:
    """Nothing was copied yet: over the link to host memory it would not be worth it, and never be tried."""
    lender = open_lender(tmp_path)
    for lenders, worth in (([Lender(lender, "borrower", 1e9)], True), ([], False)):
        shelf = LentShelf(lenders)
        kept = KvKeeper(HostPool(tmp_path / "pool", 1 << 24), "w", 1000.0, link_bytes_per_s=1e5, lent=shelf)
        kept.attach(ArrayRows((1024, 512)))
        assert kept.keep_is_worth(640) is worth
        kept.close()


def test_a_changed_byte_of_lent_memory_is_found(tmp_path: Path) -> None:
    lender = open_lender(tmp_path)
    kept, _ = keeper(tmp_path, lender)
    kept.keep(TOKENS, ROWS, "", 0, 60.0)
    assert kept._store._lent is not None
    (source,) = kept._store._lent._lenders
    third = list(source.pieces)[2]
    source.place(third).memory[-1] ^= 1
    assert kept.fetch(TOKENS, "", 0, 640, ROWS) == 128 == kept.reach(TOKENS, "", 0)
    kept.close()


def test_a_piece_that_is_being_read_stays(tmp_path: Path) -> None:
    lender = open_lender(tmp_path)
    kept, _ = keeper(tmp_path, lender)
    kept.keep(TOKENS[:64], ROWS[:64], "", 0, 60.0)
    shelf = kept._store._lent
    assert shelf is not None
    (key,) = shelf._lenders[0].pieces
    lender.offer(None)
    with shelf.opened(key) as found:
        assert found is not None
        content = found[0].memory.tobytes()
        kept.step()
        assert found[0].memory.tobytes() == content and lent(lender) > 0
    kept.step()
    assert lent(lender) == 0


def test_a_lender_that_reclaims_while_a_page_in_is_half_done_gets_all_and_the_page_in_ends_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth piece is being read when its lender wants everything back."""
    lender = open_lender(tmp_path)
    kept, rows = keeper(tmp_path, lender)
    kept.keep(TOKENS, ROWS, "", 0, 60.0)
    before, scatter, half, on = rows.at(ROWS), rows.scatter, threading.Event(), threading.Event()
    count = itertools.count(1)

    def slow(column: int, where: RowNumbers, packed: Packed) -> None:
        if next(count) == 7:  # of two columns each
            half.set()
            assert on.wait(PATIENCE_S)
        scatter(column, where, packed)

    for data in rows.data:
        data[:] = 0
    rows.scatter = slow  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as thread:
        come = thread.submit(kept.fetch, TOKENS, "", 0, 640, ROWS)
        assert half.wait(PATIENCE_S)
        lender.offer(None)
        kept.step()
        assert 0 < lent(lender) <= 4 * PAGE, "the piece that is being read"
        on.set()
        assert come.result(PATIENCE_S) == 640
    assert rows.at(ROWS) == before and kept.corrupt_pieces == 0
    kept.step()
    assert lent(lender) == 0


def test_a_piece_that_goes_while_somebody_begins_to_read_it_stays_until_he_has(tmp_path: Path) -> None:
    lender = open_lender(tmp_path)
    kept, _ = keeper(tmp_path, lender)
    kept.keep(TOKENS[:64], ROWS[:64], "", 0, 60.0)
    shelf = kept._store._lent
    assert shelf is not None
    (key,) = shelf._lenders[0].pieces
    with ExitStack() as reading:

        def elsewhere(key: Key, memory: Packed) -> None:
            found = reading.enter_context(shelf.opened(key))
            assert found is not None and (found[0].memory == memory).all()
            contents.append((found[0].memory, memory.tobytes()))

        contents: list[tuple[Packed, bytes]] = []
        lender.offer(None)
        shelf.answer(elsewhere)
        assert lent(lender) > 0 and contents[0][0].tobytes() == contents[0][1]
        with shelf.opened(key) as late:
            assert late is None, "whoever comes now finds it where it went"
    assert lent(lender) == 0


def test_a_model_that_is_not_to_borrow_has_no_lenders(tmp_path: Path) -> None:
    accounts = tmp_path / "accounts"
    lender = open_lender(tmp_path)
    memory.open_device("host:0", PAGES * PAGE, account_dir=accounts, page_bytes=PAGE)
    links = {"host:0": DeclaredLinks(host=1e9, peer=1e10)}
    write_kv_settings(accounts, KvSettings(host_bytes=1 << 24, lend_keep_fraction=0.0, links=links))
    try:
        for borrows in (False, True):
            kept = open_keeper(accounts, "host:0", borrower_name("w-1", "m/7b"), "weights", 1 << 20, borrows)
            assert kept is not None
            owners = [owner.name for owner in lender.stats().owners]
            assert owners == (["w-1/m/7b"] if borrows else [])
            kept.close()
    finally:
        drop_host_pool(accounts)
    assert borrower_of("w-1/m/7b") == "m/7b" and borrower_of("somebody") == "somebody"
    assert len(borrower_name("w" * 30, "ä" * 30).encode()) <= 63


def borrow_and_die(folder: Path) -> None:
    kept, _ = keeper(folder, open_lender(folder))
    kept.keep(TOKENS, ROWS, "", 0, 60.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_borrower_leaves_nothing_with_its_lender(tmp_path: Path) -> None:
    lender = open_lender(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=borrow_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    model = lender.register("model")
    model.reserve(PAGES * PAGE, "weights")
    assert lent(lender) == 0 and [owner.name for owner in lender.stats().owners] == ["model"]


@given(st.lists(st.integers(1, 40), max_size=40))
def test_free_ranges_never_overlap_and_come_together_again(sizes: list[int]) -> None:
    ranges = FreeRanges(200)
    held: dict[int, int] = {}
    for size in sizes:
        first = ranges.take(size)
        if first is None:
            victim = sorted(held)[size % len(held)] if held else None
            if victim is not None:
                ranges.give(victim, held.pop(victim))
            continue
        assert first + size <= 200
        assert all(first + size <= other or first >= other + n for other, n in held.items())
        held[first] = size
    for first, size in held.items():
        ranges.give(first, size)
    assert ranges.take(200) == 0
