"""Units of long prompts: with lenders first, in host memory when they want it back, lost where there is no room."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from prism import memory
from prism.kv.host_pool import HostPool
from prism.kv.lent_shelf import Lender, LentShelf
from prism.kv.long_store import LongStore, LongTiers, TiersFull
from prism.kv.piece_file import BadPiece
from prism.memory.rows import Packed
from prism.policy.long_places import AHEAD
from prism.policy.long_prompts import LongShape, TierVerdict, plan_window
from tests.patience import PATIENCE_S

PAGE = 64 << 10
SHAPE = LongShape(2, 1024)
PLAN = plan_window(SHAPE, 1 << 40)
assert PLAN is not None
UNIT = PLAN.unit_bytes


def data(number: int) -> Packed:
    return np.full(UNIT, number, dtype=np.uint8)


def lender(folder: Path, units: int, name: str = "host:1") -> memory.Device:
    device = memory.open_device(name, units * UNIT, account_dir=folder / "accounts", page_bytes=PAGE)
    device.offer(0)
    return device


def tiers(folder: Path, host_units: int, device: memory.Device | None = None) -> LongTiers:
    shelf = None if device is None else LentShelf([Lender(device, "borrower", 0.0)])
    return LongTiers(HostPool(folder / "pool", host_units * UNIT), shelf, 0.0)


def several(folder: Path, host_units: int, rates: dict[str, float], host: float, units: int = 8) -> LongTiers:
    """Lenders by name and rate, each with room for so many ``units``."""
    devices = {name: lender(folder, units, name) for name in rates}
    shelf = LentShelf([Lender(devices[name], "borrower", rate) for name, rate in rates.items()])
    return LongTiers(HostPool(folder / "pool", host_units * UNIT), shelf, host)


def lent_units(made: LongTiers) -> dict[str, int]:
    assert made._lent is not None
    return {lender.device.name: lender.lent_bytes // UNIT for lender in made._lent.lenders}


def begin(made: LongTiers, pieces: int) -> LongStore:
    assert PLAN is not None
    store = made.begin(SHAPE, PLAN, pieces * PLAN.piece_tokens)
    assert isinstance(store, LongStore)
    return store


def assert_there(store: LongStore, *numbers: int) -> None:
    for number in numbers:
        with store.read((0, number)) as found:
            assert (found == number).all()


def test_what_lenders_want_back_goes_to_host_memory(tmp_path: Path) -> None:
    device = lender(tmp_path, 4)
    made = tiers(tmp_path, 8, device)
    store = begin(made, 2)
    assert store.host_bytes == 0, "the lender has room for all of it"
    for number in range(4):
        store.put((0, number), data(number))
    assert store.lent_bytes == 4 * UNIT
    assert_there(store, 0, 1, 2, 3)
    device.offer(None)
    store.answer()
    assert store.lent_bytes == 0
    assert device.free_bytes() == device.capacity_bytes
    assert_there(store, 0, 1, 2, 3)
    store.close()
    made.close()
    assert HostPool(tmp_path / "pool", 8 * UNIT).use().booked_bytes == 0
    assert not device.audit().problems


def test_ranks_of_an_engine_share_what_host_memory_there_is(tmp_path: Path) -> None:
    pool = HostPool(tmp_path / "pool", 8 * UNIT)
    assert PLAN is not None
    ranks = [LongTiers(pool, None, 0.0, "m", 2) for _ in range(2)]
    stores = [made.begin(SHAPE, PLAN, 2 * PLAN.piece_tokens) for made in ranks]
    assert all(isinstance(store, LongStore) for store in stores)
    assert pool.claims() == {"m": 8 * UNIT}
    for store in stores:
        assert isinstance(store, LongStore)
        store.close()
    never = ranks[0].begin(SHAPE, PLAN, 3 * PLAN.piece_tokens)
    assert isinstance(never, LongStore), "the other rank may need less"
    never.close()
    more = ranks[0].begin(SHAPE, PLAN, 5 * PLAN.piece_tokens)
    assert isinstance(more, TierVerdict)
    assert not more.may_fit


def test_a_unit_that_finds_no_room_when_its_lender_wants_it_is_told_to_be_gone(tmp_path: Path) -> None:
    device = lender(tmp_path, 4)
    made = tiers(tmp_path, 1, device)
    store = begin(made, 2)
    for number in range(4):
        store.put((0, number), data(number))
    device.offer(None)
    store.answer()
    gone = 0
    for number in range(4):
        try:
            assert_there(store, number)
        except BadPiece:
            gone += 1
    assert gone == 3
    with pytest.raises(TiersFull):
        store.put((1, 0), data(9))
    store.close()
    made.close()


def test_one_prompt_waits_for_what_another_has_claimed_and_a_third_never_fits(tmp_path: Path) -> None:
    made = tiers(tmp_path, 8)
    assert PLAN is not None
    first = begin(made, 3)
    waits = made.begin(SHAPE, PLAN, 2 * PLAN.piece_tokens)
    assert isinstance(waits, TierVerdict)
    assert waits.may_fit
    assert not waits.fits
    never = made.begin(SHAPE, PLAN, 5 * PLAN.piece_tokens)
    assert isinstance(never, TierVerdict)
    assert not never.may_fit
    first.close()
    begin(made, 2).close()


def claim_and_wait(folder: Path, ready: object) -> None:
    claim = HostPool(folder / "pool", 8 * UNIT).claim(6 * UNIT, "org/a-model")
    assert claim is not None
    claim.write(data(1), 0)
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


def test_what_a_killed_process_has_claimed_is_free_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=claim_and_wait, args=(tmp_path, ready))
    process.start()
    assert ready.wait(PATIENCE_S)
    pool = HostPool(tmp_path / "pool", 8 * UNIT)
    assert pool.claimable_bytes() == 2 * UNIT
    assert pool.claim(3 * UNIT) is None
    assert pool.claims() == {"org/a-model": 6 * UNIT}
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert pool.claims() == {}
    assert pool.use().booked_bytes == 0
    claim = pool.claim(8 * UNIT)
    assert claim is not None
    claim.close()
    assert pool.use().booked_bytes == 0


@pytest.mark.parametrize("lends", [True, False])
def test_a_unit_that_is_stored_again_takes_the_place_of_what_was_there(tmp_path: Path, lends: bool) -> None:
    device = lender(tmp_path, 2)
    made = tiers(tmp_path, 2, device if lends else None)
    store = begin(made, 1)
    for number in (1, 2, 3):
        store.put((0, 0), data(number))
        with store.read((0, 0)) as found:
            assert (found == number).all()
    assert (store.lent_bytes if lends else store.host_bytes - UNIT) == UNIT
    store.close()
    made.close()
    assert device.free_bytes() == device.capacity_bytes


@pytest.mark.parametrize("lent_units", [0, 2])
def test_what_is_dropped_makes_room_for_others(tmp_path: Path, lent_units: int) -> None:
    device = lender(tmp_path, lent_units) if lent_units else None
    made = tiers(tmp_path, 2, device)
    store = begin(made, 1)
    for number in range(20):
        store.put((0, number), data(number))
        store.drop([(0, number - 1), (0, number + 7)])
        assert_there(store, number)
    with pytest.raises(BadPiece), store.read((0, 18)):
        pass
    assert store.host_bytes + store.lent_bytes <= 2 * UNIT
    store.close()
    made.close()
    assert HostPool(tmp_path / "pool", 2 * UNIT).use().booked_bytes == 0
    assert device is None or device.free_bytes() == device.capacity_bytes


def test_units_are_dealt_over_places_of_known_rates(tmp_path: Path) -> None:
    made = several(tmp_path, 8, {"host:1": 3e9, "host:2": 3e9}, 1e9)
    assert made.ahead == AHEAD
    store = begin(made, 4)
    for number in range(7):
        store.put((0, number), data(number))
    assert lent_units(made) == {"host:1": 3, "host:2": 3}
    assert store.lent_bytes == 6 * UNIT
    assert_there(store, *range(7))
    store.close()
    made.close()


def test_what_a_place_has_no_room_for_goes_to_others(tmp_path: Path) -> None:
    made = several(tmp_path, 2, {"host:1": 3e9, "host:2": 3e9}, 2e9, units=4)
    store = begin(made, 4)
    for number in range(8):
        store.put((0, number), data(number))
    store.put((1, 0), data(8))
    store.put((1, 1), data(9))
    assert lent_units(made) == {"host:1": 4, "host:2": 4}
    assert store.host_bytes == 2 * UNIT
    with pytest.raises(TiersFull):
        store.put((1, 2), data(10))
    assert_there(store, *range(8))
    store.close()
    made.close()


def test_who_lends_nothing_when_a_request_begins_is_dealt_nothing(tmp_path: Path) -> None:
    made = several(tmp_path, 8, {"host:1": 2e9, "host:2": 2e9}, 1e9)
    assert made._lent is not None
    made._lent.lenders[0].device.offer(None)
    store = begin(made, 4)
    for number in range(6):
        store.put((0, number), data(number))
    assert lent_units(made) == {"host:1": 0, "host:2": 4}
    assert_there(store, *range(6))
    store.close()
    made.close()


@pytest.mark.parametrize(("peer", "host"), [(0.0, 1e9), (1e9, 0.0), (1e9, 1e8)])
def test_where_rates_are_not_known_or_far_apart_the_fastest_lender_has_all(
    tmp_path: Path, peer: float, host: float
) -> None:
    made = several(tmp_path, 8, {"host:1": peer}, host)
    assert made.ahead == 1
    store = begin(made, 4)
    for number in range(4):
        store.put((0, number), data(number))
    assert lent_units(made) == {"host:1": 4}
    store.close()
    made.close()


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    made = several(tmp_path, 8, {"host:1": 3e9, "host:2": 3e9}, 1e9)
    store = begin(made, 4)
    for number in range(8):
        store.put((0, number), data(number))
    with ThreadPoolExecutor(AHEAD) as threads:
        for _ in range(20):
            list(threads.map(lambda number: assert_there(store, number), range(8)))
    assert made.brought_bytes == 20 * 8 * UNIT
    store.close()
    made.close()
