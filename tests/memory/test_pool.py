"""Pools: order of filling, promises, mapping ahead, fences, pressure, threads, the paper's interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from prism import memory
from prism.memory import errors
from tests.memory.drivers import Bed


def make(bed: Bed, lease_pages: int | None = None, name: str = "a") -> tuple[memory.Owner, memory.Pool]:
    """A pool with 16 slots a page, 900 at most."""
    owner = bed.device.register(name)
    lease = None if lease_pages is None else lease_pages * bed.page_bytes
    return owner, owner.arena(64 * bed.page_bytes).divide(bed.layout(), 900, lease)


def eventually(condition: Callable[[], bool]) -> None:
    """The helper thread does it in its own time."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it never happened")


def test_the_fullest_page_is_filled_first(bed: Bed) -> None:
    _, pool = make(bed)
    slots = pool.alloc(15 + 16 * 4)
    pages = slots // 16
    pool.free(np.concatenate([slots[pages == 1][:12], slots[pages == 2][:2], slots[pages == 3][:7]]))
    assert (pool.alloc(2) // 16 == 2).all(), "two free slots: the fullest"
    assert (pool.alloc(7) // 16 == 3).all()
    assert (pool.alloc(12) // 16 == 1).all()
    pool.check()


def test_sequences_keep_pages_of_their_own(bed: Bed) -> None:
    """Two that grow side by side share no page, so that one's end frees its pages whole."""
    owner, pool = make(bed)
    a, b = pool.alloc(20, fresh=True), pool.alloc(20, fresh=True)
    mine, yours = [a], [b]
    for _ in range(40):
        step = pool.alloc_after(np.array([mine[-1][-1], yours[-1][-1]]))
        mine.append(step[:1])
        yours.append(step[1:])
    a, b = np.concatenate(mine), np.concatenate(yours)
    assert not set(a // 16) & set(b // 16) and len(set(a // 16)) == 4
    pool.free(a)
    assert owner.leased_bytes == 5 * bed.page_bytes


def test_a_sequence_whose_last_slot_is_gone_starts_a_page_of_its_own(bed: Bed) -> None:
    _, pool = make(bed)
    others = pool.alloc(20, fresh=True)
    gone = pool.alloc(16, fresh=True)[-1:]
    pool.free(gone)
    step = pool.alloc_after(np.array([others[-1], gone[0], 0, -1]))
    assert step[0] // 16 == others[-1] // 16
    assert len(set(step // 16)) == 4
    assert pool.scattered() == pool.available() == 15 + 11 + 1 + 3 * 15
    pool.check()


def test_sequences_share_pages_when_there_are_no_others(bed: Bed) -> None:
    _, pool = make(bed, 3)
    ends = pool.alloc(20, fresh=True)[-1:]
    for _ in range(pool.available()):
        ends = pool.alloc_after(ends)
    assert pool.available() == 0 and pool.used() == 47
    with pytest.raises(errors.OutOfMemory):
        pool.alloc_after(ends)
    pool.check()


def test_pages_empty_out_and_go(bed: Bed) -> None:
    owner, pool = make(bed)
    slots = pool.alloc(15 + 16 * 9)
    assert owner.leased_bytes == 10 * bed.page_bytes
    pool.free(slots[slots // 16 >= 4])
    assert owner.leased_bytes == 4 * bed.page_bytes
    pool.free(slots[slots // 16 < 4])
    assert owner.leased_bytes == bed.page_bytes, "idle: one page"


def test_a_promise_holds_against_everybody(bed: Bed) -> None:
    _, pool = make(bed, 10)
    rival = bed.device.register("rival")
    rival.reserve(bed.device.free_bytes(), "weights")
    promised = pool.available()
    assert promised == 159 and not pool.ensure(160)
    assert len(pool.alloc(promised)) == promised
    with pytest.raises(errors.OutOfMemory) as caught:
        pool.alloc(1)
    assert caught.value.numbers["available_slots"] == 0


def test_a_lowered_lease_is_worked_down(bed: Bed) -> None:
    owner, pool = make(bed, 10)
    slots = pool.alloc(100)
    pool.set_lease(3 * bed.page_bytes)
    assert pool.available() == 0 and pool.lease_bytes == 7 * bed.page_bytes
    pool.free(slots[slots // 16 >= 2])
    assert owner.leased_bytes == 3 * bed.page_bytes and pool.available() == 16
    pool.set_lease(20 * bed.page_bytes)
    assert pool.available() == 320 - 1 - 31


def test_dividing_again_keeps_pages(bed: Bed) -> None:
    """A lease that both models need is never given up in between, nor are its physical pages."""
    owner = bed.device.register("a")
    arena = owner.arena(64 * bed.page_bytes)
    first = arena.divide(bed.layout(), 300, 10 * bed.page_bytes)
    first.alloc(150)
    rival = bed.device.register("rival")
    rival.reserve(bed.device.free_bytes(), "kv")
    second = arena.divide(bed.layout(8), 300, 10 * bed.page_bytes)
    assert owner.leased_bytes == 10 * bed.page_bytes and owner.spare_bytes >= 8 * bed.page_bytes
    assert second.available() == 79 and not first.is_open and first.lease_bytes == 0


def test_mapping_ahead(bed: Bed) -> None:
    owner, pool = make(bed)
    pool.set_ahead(2 * bed.page_bytes, 4 * bed.page_bytes)
    eventually(lambda: pool.stats()["ahead_bytes"] == 4 * bed.page_bytes)
    pool.alloc(15 + 16 * 3)
    eventually(lambda: pool.stats()["ahead_bytes"] >= 2 * bed.page_bytes)
    pool.quiesce()
    assert pool.stats()["ahead_bytes"] <= 4 * bed.page_bytes
    rival = bed.device.register("rival")
    rival.reserve(bed.device.capacity_bytes - 4 * bed.page_bytes, "kv", 30.0)
    assert pool.stats()["ahead_bytes"] == 0 and owner.leased_bytes == 4 * bed.page_bytes
    pool.check()


def test_a_lease_is_mapped_ahead_as_far_as_it_goes(bed: Bed) -> None:
    """Leased pools map ahead within their lease only, and keep what they promised when others wait."""
    owner, pool = make(bed, 10)
    pool.set_ahead(20 * bed.page_bytes, None)
    eventually(lambda: pool.stats()["ahead_bytes"] == 9 * bed.page_bytes)
    assert owner.leased_bytes == 10 * bed.page_bytes and pool.available() == 159
    rival = bed.device.register("rival")
    with pytest.raises(errors.OutOfMemory):
        rival.reserve(bed.device.free_bytes() + 1, "kv", 0.3)
    assert pool.available() == 159
    maps = pool.stats()["maps"]
    pool.alloc(159)
    assert pool.stats()["maps"] == maps, "nothing was left to map"
    pool.check()


def test_pages_mapped_ahead_go_with_the_lease(bed: Bed) -> None:
    owner, pool = make(bed, 40)
    kept = pool.alloc(20)
    pool.set_ahead(30 * bed.page_bytes, None)
    eventually(lambda: pool.stats()["ahead_bytes"] == 30 * bed.page_bytes)
    assert pool.give_back(keep_slots=11 + 3 * 16) == 35 * bed.page_bytes, "11 are free beside those kept"
    assert pool.stats()["ahead_bytes"] == 3 * bed.page_bytes and owner.leased_bytes == 5 * bed.page_bytes
    pool.trim()
    assert pool.used() == len(kept) and owner.leased_bytes == 2 * bed.page_bytes
    assert pool.stats()["mapped_bytes"] == 2 * bed.page_bytes and owner.spare_bytes == 0


def test_an_owner_gives_back_what_is_asked_for(bed: Bed) -> None:
    owner, pool = make(bed, 40)
    pool.alloc(100)
    rival = bed.device.register("rival")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rival.reserve, bed.device.free_bytes() + 3 * bed.page_bytes, "weights", 30.0)
        eventually(lambda: pool.pressure() > 0)
        assert pool.pressure() == 3 * bed.page_bytes == pool.give_back(most_bytes=pool.pressure())
        waiting.result(30)
    assert owner.leased_bytes == 37 * bed.page_bytes and pool.pressure() == 0
    bed.device.set_limit(owner.id, 10 * bed.page_bytes)
    assert pool.give_back(keep_slots=20, most_bytes=pool.pressure()) == 27 * bed.page_bytes
    assert pool.give_back(keep_slots=40) == 1 * bed.page_bytes


def test_a_fence_keeps_pages_but_not_slots(bed: Bed) -> None:
    owner, pool = make(bed)
    slots = pool.alloc(100)
    fence = memory.Fence()
    pool.fence_with(fence)
    pool.free(slots)
    assert owner.leased_bytes == 7 * bed.page_bytes
    bed.read(pool.address + int(slots[-1]) * pool.slot_bytes, 8)
    again = pool.alloc(100)
    assert pool.stats()["maps"] == 6, "reuse is ordered by the engine itself: no page was mapped anew"
    pool.free(again)
    fence.signal()
    eventually(lambda: owner.leased_bytes == bed.page_bytes)


def test_threads_share_a_pool(bed: Bed) -> None:
    """Slots are never handed out twice, whatever is mapped and unmapped meanwhile."""
    _, pool = make(bed)
    pool.set_ahead(bed.page_bytes, 2 * bed.page_bytes)

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        done = 0
        for _ in range(300):
            try:
                slots = pool.alloc(int(rng.integers(1, 60)))
            except errors.OutOfMemory:
                continue
            for slot in slots[:3]:
                bed.write(pool.address + int(slot) * pool.slot_bytes, seed.to_bytes(8, "little"))
            for slot in slots[:3]:
                assert bed.read(pool.address + int(slot) * pool.slot_bytes, 8) == seed.to_bytes(8, "little")
            pool.free(slots)
            done += 1
        return done

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    pool.quiesce()
    pool.check()
    assert pool.used() == 0 and not bed.device.audit().problems


def test_what_is_no_array_of_slots_is_refused(bed: Bed) -> None:
    _, pool = make(bed)
    for bad in (np.zeros(3, dtype=np.int32), np.zeros((2, 2), dtype=np.int64), np.zeros(3)):
        with pytest.raises(errors.BadRequest, match="int64"):
            pool.free(bad)
    with pytest.raises(errors.BadRequest):
        pool.alloc(-1)
    with pytest.raises((TypeError, ValueError, BufferError)):
        pool.free("slots")
    pool.free([])
    assert len(pool.alloc(0)) == 0


def test_the_papers_interface(bed: Bed) -> None:
    owner = bed.device.register("a")
    pool = memory.alloc_kvcache(owner, bed.layout(), 300, page_bytes=bed.page_bytes)
    slots = memory.alloc_kv(pool, 100)
    assert pool.used() == 100
    memory.free_kv(pool, slots)
    memory.free_kvcache(pool)
    assert owner.leased_bytes == 0


def test_everything_goes_with_its_owner(bed: Bed) -> None:
    owner, pool = make(bed, 10)
    region = owner.weight_region(bed.page_bytes)
    region.commit()
    owner.close()
    assert bed.device.free_bytes() == bed.device.capacity_bytes
    for call in (lambda: pool.alloc(1), region.commit, lambda: owner.arena(1)):
        with pytest.raises(errors.ClosedHandle):
            call()


def test_books_of_an_idle_engine_are_small(bed: Bed) -> None:
    _, pool = make(bed)
    stats = pool.stats()
    assert stats["mapped_bytes"] == bed.page_bytes and stats["books_bytes"] < 8192
