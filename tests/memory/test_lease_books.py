"""The books of a lease against a model that tries everything out: what pools do in any order, every answer compared."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.memory.lease_model import ABSENT, MAPPING, READY, UNLIMITED, UNMAPPING, Books, Model, build_books

SETTINGS = settings(max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_books(Path(tmp_path_factory.mktemp("lease-books")))


class LeaseBooksMachine(RuleBasedStateMachine):
    """Does to books and model what a pool does, in any order that keeps its rules."""

    library: ctypes.CDLL

    @initialize(
        blocks=st.integers(1, 12),
        slots=st.integers(1, 5),
        cut=st.integers(0, 4),
        held=st.integers(1, 12),
        elastic=st.booleans(),
    )
    def open(self, blocks: int, slots: int, cut: int, held: int, elastic: bool) -> None:
        held = 1 if elastic else min(held, blocks)
        most = max(0, blocks * slots - 1 - cut)
        self.model = Model(slots, most, held, elastic, [0, *[ABSENT] * (blocks - 1)], target=held)
        self.books = Books(self.library, self.model)

    def teardown(self) -> None:
        if hasattr(self, "books"):
            self.books.delete()

    # ---- slots ----

    @rule(data=st.data())
    def promise_what_is_available(self, data: st.DataObject) -> None:
        slots = data.draw(st.integers(0, self.books.ask("available")))
        self.books.tell("promise", slots)
        self.model.promised += slots

    @precondition(lambda self: self.model.promised > 0)
    @rule(data=st.data())
    def keep_a_promise(self, data: st.DataObject) -> None:
        """A slot of a used block, or of one that is mapped and empty, if the promise may use another."""
        places = [b for b in self.model.used() if self.model.free_in(b)] or self.model.where(READY)
        if places:
            block = data.draw(st.sampled_from(places))
            state = self.model.blocks[block]
            self.model.blocks[block] = state + 1 if isinstance(state, int) else 1
            self.model.promised -= 1
            self.books.tell("fulfil", 1)

    @precondition(lambda self: self.model.promised > 0)
    @rule()
    def break_a_promise(self) -> None:
        self.books.tell("fulfil", self.model.promised)
        self.model.promised = 0

    @precondition(lambda self: self.model.used_slots() > 0)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in self.model.used() if self.model.blocks[b] != 0]))
        state = self.model.blocks[block]
        assert isinstance(state, int)
        left = state - data.draw(st.integers(1, state))
        self.model.blocks[block] = left if left or block == 0 else READY
        self.books.tell("forget_ensured")
        self.model.ensured = 0

    # ---- pages ----

    @precondition(lambda self: self.model.mapped() < self.model.held and self.model.where(ABSENT))
    @rule(ahead=st.booleans())
    def begin_mapping(self, ahead: bool) -> None:
        if ahead and self.model.mapped() < self.model.target:
            self.model.refilling += 1
            self.books.tell("begin_refill")
        self.model.blocks[self.model.where(ABSENT)[0]] = MAPPING

    @precondition(lambda self: self.model.where(MAPPING))
    @rule(mapped=st.booleans())
    def end_mapping(self, mapped: bool) -> None:
        self.model.blocks[self.model.where(MAPPING)[0]] = READY if mapped else ABSENT
        while self.model.refilling > len(self.model.where(MAPPING)):
            self.model.refilling -= 1
            self.books.tell("end_refill")

    @rule(high=st.integers(0, 4) | st.just(UNLIMITED))
    def begin_unmapping(self, high: int) -> None:
        if self.books.ask("surplus", high) > 0:
            self.model.blocks[self.model.where(READY)[0]] = UNMAPPING

    @precondition(lambda self: self.model.where(UNMAPPING))
    @rule(unmapped=st.booleans())
    def end_unmapping(self, unmapped: bool) -> None:
        self.model.blocks[self.model.where(UNMAPPING)[0]] = ABSENT if unmapped else READY

    # ---- the lease ----

    @rule(slots=st.integers(0, 40))
    def ensure(self, slots: int) -> None:
        if slots > self.model.room():
            return
        needed = self.books.ask("needed", slots)
        if slots > self.books.ask("available"):
            if needed > self.model.held:
                self.books.tell("grant", needed - self.model.held)
                self.model.held = needed
            self.books.tell("raise_target", needed)
            self.model.target = max(self.model.target, needed)
        self.books.tell("keep_ensured", needed)
        self.model.ensured = max(self.model.ensured, needed)
        assert self.books.ask("available") >= slots

    @rule(keep=st.integers(0, 20), most=st.integers(0, 12))
    def give_back(self, keep: int, most: int) -> None:
        before = self.books.ask("available")
        blocks = min(self.books.ask("unneeded", keep), most)
        self.books.tell("shrink", blocks)
        self.model.target -= blocks
        assert self.books.ask("available") >= min(keep, before)

    @rule(lease=st.integers(1, 12))
    def set_lease(self, lease: int) -> None:
        lease = min(lease, len(self.model.blocks))
        if lease > self.model.held:
            self.books.tell("grant", lease - self.model.held)
            self.model.held = lease
        self.books.tell("set_leased", lease)
        self.model.target, self.model.elastic = lease, False

    @rule(ready=st.integers(0, 4) | st.just(UNLIMITED))
    def follow_use(self, ready: int) -> None:
        expected = self.model.followed(ready)
        self.books.follow_use(ready)
        self.model.target = expected

    @rule()
    def take_back(self) -> None:
        expected = self.model.returnable()
        assert self.books.ask("take_back") == expected
        self.model.held -= expected

    # ---- after every step ----

    @invariant()
    def all_answers_are_those_of_the_model(self) -> None:
        if not hasattr(self, "books"):
            return
        model, books = self.model, self.books
        assert books.state() == (model.held, model.target)
        assert books.problem() is None
        assert books.ask("available") == model.available()
        assert books.ask("room") == model.room()
        assert books.ask("returnable") == model.returnable()
        for number in (0, 1, 7):
            assert books.ask("needed", number) == model.needed(number)
            assert books.ask("unneeded", number) == model.unneeded(number)
            assert books.ask("surplus", number) == model.surplus(number)
        assert books.ask("surplus", UNLIMITED) == model.surplus(UNLIMITED)

    @invariant()
    def what_was_promised_is_covered(self) -> None:
        if hasattr(self, "books"):
            assert self.model.slots_under(self.model.held) >= self.model.promised


def test_books_against_the_model(library: ctypes.CDLL) -> None:
    machine = type("Machine", (LeaseBooksMachine,), {"library": library})
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_broken_books_are_found(library: ctypes.CDLL) -> None:
    model = Model(4, 100, 2, False, [0, READY, READY, ABSENT], target=2)
    books = Books(library, model)
    assert books.problem() == b"the lease does not cover what is mapped"
    books.tell("grant", 1)
    assert books.problem() is None
    books.tell("shrink", 2)
    assert books.problem() == b"the target is not within the lease"
    books.delete()
