"""A pool against a model of sets and counts: every operation in any order, every invariant after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prism import memory
from prism.memory import errors
from tests.memory.drivers import Bed

SIZES = st.integers(1, 60)


class PoolMachine(RuleBasedStateMachine):
    """One owner with a pool and a weight region, and a rival owner on the same device."""

    bed: Bed
    shapes: tuple[memory.KvLayout, ...]

    def __init__(self) -> None:
        super().__init__()
        self.owner = self.bed.device.register("under test")
        self.rival = self.bed.device.register("rival")
        self.arena = self.owner.arena(40 * PoolMachine.largest(self.bed))
        self.region = self.owner.weight_region(5 * self.bed.page_bytes - 100, page_bytes=self.bed.page_bytes)
        self.stamps: dict[int, int] = {}
        self.stamp = 0
        self.fences: list[memory.Fence] = []
        self.limited = False

    @staticmethod
    def largest(bed: Bed) -> int:
        return 16 * bed.page_bytes

    @initialize(shape=st.integers(0, 10), lease_pages=st.none() | st.integers(0, 40))
    def divide(self, shape: int, lease_pages: int | None) -> None:
        layout = self.shapes[shape % len(self.shapes)]
        lease = None if lease_pages is None else lease_pages * self.bed.page_bytes
        self.pool = self.arena.divide(layout, 300, lease)
        self.stamps.clear()

    def teardown(self) -> None:
        for fence in self.fences:
            fence.signal()
        if hasattr(self, "pool"):
            self.owner.close()
            self.rival.close()
            self.bed.device.note_foreign(0)
            books = self.bed.device.stats()
            assert books.charged_bytes == 0 and not books.owners

    # ---- the content of every slot in use survives whatever happens to others ----

    def _address(self, slot: int) -> int:
        view = memory.row_views(self.pool)[0][0]
        item, per_slot = self.pool.layout.dtype_bytes, self.pool.layout.tokens_per_slot
        return self.pool.address + (view.start + slot * per_slot * view.row) * item

    def _write(self, slots: list[int]) -> None:
        for slot in slots:
            self.stamp += 1
            self.stamps[slot] = self.stamp
            self.bed.write(self._address(slot), self.stamp.to_bytes(8, "little"))

    def _forget(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.bed.read(self._address(slot), 8) == self.stamps.pop(slot).to_bytes(8, "little")

    # ---- slots ----

    @rule(count=SIZES)
    def alloc(self, count: int) -> None:
        promised = self.pool.available()
        try:
            slots = self.pool.alloc(count).tolist()
        except errors.OutOfMemory:
            assert count > promised, "refused although promised"
            return
        assert len(set(slots)) == count and not self.stamps.keys() & set(slots)
        assert all(0 < slot < self.pool.slot_ids for slot in slots)
        self._write(slots)

    @rule(data=st.data())
    def alloc_all_that_is_promised(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(self.pool.available(), 100)))
        buffer = np.empty(count, dtype=np.int64)
        self.pool.alloc_into(buffer)
        self._write(buffer.tolist())

    @rule(count=SIZES)
    def alloc_fresh(self, count: int) -> None:
        promised = self.pool.available()
        try:
            slots = self.pool.alloc(count, fresh=True).tolist()
        except errors.OutOfMemory:
            assert count > promised
            return
        assert len(set(slots)) == count and not self.stamps.keys() & set(slots)
        self._write(slots)

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def sequences_go_on(self, data: st.DataObject) -> None:
        gone = st.integers(-2, self.pool.slot_ids - 1)  # given back meanwhile, or never handed out: no block yet
        ends = data.draw(st.lists(st.sampled_from(sorted(self.stamps)) | gone, min_size=1, max_size=20))
        promised = self.pool.available()
        try:
            slots = self.pool.alloc_after(np.array(ends, dtype=np.int64)).tolist()
        except errors.OutOfMemory:
            assert len(ends) > promised
            return
        assert len(set(slots)) == len(ends) and not self.stamps.keys() & set(slots)
        self._write(slots)

    @rule(beyond=st.integers(0, 400))
    def sequences_end_in_slots_of_the_pool(self, beyond: int) -> None:
        if self.pool.available() > 0:
            with pytest.raises(errors.ForeignSlot):
                self.pool.alloc_after(np.array([self.pool.slot_ids + beyond], dtype=np.int64))

    @precondition(lambda self: self.stamps)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.stamps)), unique=True))
        self._forget(slots)
        self.pool.free(np.array(slots, dtype=np.int64))

    @precondition(lambda self: self.stamps)
    @rule()
    def free_all_but_one(self) -> None:
        slots = sorted(self.stamps)[1:]
        self._forget(slots)
        self.pool.free(slots)

    @rule(data=st.data(), bad=st.sampled_from([-5, 0, 1 << 40]))
    def foreign_slots_are_refused_whole(self, data: st.DataObject, bad: int) -> None:
        good = sorted(self.stamps)[:3]
        with pytest.raises(errors.ForeignSlot):
            self.pool.free(np.array([*good, bad], dtype=np.int64))

    @rule(slot=st.integers(1, 299))
    def double_frees_are_refused_whole(self, slot: int) -> None:
        good = sorted(self.stamps)[:3]
        bad = good[0] if good else slot
        with pytest.raises((errors.DoubleFree, errors.ForeignSlot)):
            self.pool.free(np.array([*good, bad], dtype=np.int64))

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.stamps.clear()

    # ---- leases ----

    @rule(pages=st.integers(0, 60))
    def set_lease(self, pages: int) -> None:
        before = self.pool.lease_bytes
        try:
            self.pool.set_lease(pages * self.bed.page_bytes)
        except errors.OutOfMemory:
            assert self.pool.lease_bytes == before

    @rule(count=st.integers(0, 400))
    def ensure(self, count: int) -> None:
        before, available = self.pool.lease_bytes, self.pool.available()
        if self.pool.ensure(count):
            assert self.pool.available() >= count
        else:
            assert (self.pool.lease_bytes, self.pool.available()) == (before, available)

    @rule(count=SIZES, fresh=st.booleans())
    def back(self, count: int, fresh: bool) -> None:
        available, maps = self.pool.available(), self.pool.stats()["maps"]
        assert self.pool.back(count, fresh), "the device has what the account has"
        assert self.pool.available() == available
        if available:
            self._write(self.pool.alloc(min(count, available), fresh=fresh).tolist())
            blocks = -(-count // self.pool.block_slots)
            assert self.pool.stats()["maps"] <= maps + blocks + 1, "no more than asked for"

    @rule(keep=st.integers(0, 50))
    def give_back(self, keep: int) -> None:
        available = self.pool.available()
        self.pool.give_back(keep)
        assert self.pool.available() >= min(keep, available)

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.owner.spare_bytes == 0

    @rule(high=st.integers(0, 4) | st.none())
    def keep_mapped(self, high: int | None) -> None:
        self.pool.set_ahead(0, None if high is None else high * self.pool.block_bytes)

    @rule()
    def fence(self) -> None:
        self.fences.append(memory.Fence())
        self.pool.fence_with(self.fences[-1])

    @rule()
    def signal(self) -> None:
        for fence in self.fences:
            fence.signal()
        self.pool.fence_with(None)

    @precondition(lambda self: all(fence.passed() for fence in self.fences))
    @rule(shape=st.integers(0, 10), lease_pages=st.none() | st.integers(0, 40))
    def divide_again(self, shape: int, lease_pages: int | None) -> None:
        old = self.pool
        try:
            self.divide(shape, lease_pages)
        except errors.OutOfMemory:
            assert old.is_open
            return
        assert not old.is_open
        with pytest.raises(errors.ClosedHandle):
            old.alloc(1)

    # ---- others on the device ----

    @rule(pages=st.integers(0, 64))
    def rival_reserves(self, pages: int) -> None:
        free, nbytes = self.bed.device.free_bytes(), pages * self.bed.page_bytes
        try:
            self.rival.reserve(nbytes, "staging")
            assert nbytes <= free
        except errors.OutOfMemory:
            assert nbytes > free

    @rule()
    def rival_releases(self) -> None:
        self.rival.release(self.rival.held("staging"), "staging")

    @rule(pages=st.integers(0, 64))
    def strangers_hold(self, pages: int) -> None:
        self.bed.device.note_foreign(pages * self.bed.page_bytes)

    @rule(pages=st.none() | st.integers(0, 64))
    def limit(self, pages: int | None) -> None:
        nbytes = None if pages is None else pages * self.bed.page_bytes
        self.bed.device.set_limit(self.owner.id, nbytes)
        self.pool.quiesce()  # the helper thread was rung: between two reads of the books it may give back
        assert self.owner.excess() == (0 if nbytes is None else max(0, self.owner.leased_bytes - nbytes))

    @rule(first=st.integers(0, 4), pages=st.integers(1, 5))
    def commit_weights(self, first: int, pages: int) -> None:
        held, offset = self.owner.held("weights"), first * self.bed.page_bytes
        nbytes = min(pages * self.bed.page_bytes, self.region.nbytes - offset)
        try:
            added = self.region.commit(nbytes, offset_bytes=offset)
        except errors.OutOfMemory:
            added = 0
        else:
            self.bed.write(self.region.address + offset, b"weights!")
        assert self.owner.held("weights") == self.region.committed_bytes == held + added

    @rule()
    def decommit_weights(self) -> None:
        self.region.decommit()
        assert self.region.committed_bytes == 0

    # ---- after every step ----

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.quiesce()  # so that the next step does not depend on how far the helper thread has come
        self.pool.check()
        stats = self.pool.stats()
        assert self.pool.used() == len(self.stamps)
        assert self.owner.held("kv") == stats["lease_bytes"]
        assert stats["mapped_bytes"] <= stats["lease_bytes"]
        assert self.pool.available() + self.pool.used() <= self.pool.max_slots
        assert self.bed.read(self.pool.address, 8) is not None  # the padding slot is always there
        audit = self.bed.device.audit()
        assert not audit.problems
        assert audit.books.charged_bytes <= audit.books.capacity_bytes
        mine = next(o for o in audit.books.owners if o.id == self.owner.id)
        assert mine.mapped_bytes == stats["mapped_bytes"] + self.region.committed_bytes
        assert mine.physical_bytes <= mine.leased_bytes
