"""The pool's book: everything has a home while there is room, evenly by bytes, and little is moved."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prism.policy.live.parameter_pool import ParameterPool

MACHINES = "abcd"
SIZES = (1, 2, 3, 5, 8)


def pool_of(capacities: dict[str, int], needed: dict[str, int], copies: dict[str, set[str]]) -> ParameterPool:
    pool = ParameterPool()
    for name, capacity in capacities.items():
        pool.put_machine(name, capacity)
        pool.set_copies(name, copies.get(name, set()))
    for entry, nbytes in needed.items():
        pool.need(entry, nbytes)
    pool.settle()
    return pool


def spread(loads: list[int]) -> int:
    return max(loads) - min(loads)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, set[str]]]:
    """A few entries, and what is where, on three machines."""
    needed = {f"e{i}": draw(st.sampled_from(SIZES)) for i in range(draw(st.integers(1, 5)))}
    return needed, {m: draw(st.sets(st.sampled_from(sorted(needed)))) for m in "abc"}


@settings(max_examples=50, deadline=None)
@given(fleets())
def test_no_more_is_sent_than_the_balance_asks_for(fleet: tuple[dict[str, int], dict[str, set[str]]]) -> None:
    """Against all homes there are: as few fetches as any that is as even, but one; and as even as promised."""
    needed, copies = fleet
    pool = pool_of(dict.fromkeys("abc", 1000), needed, copies)
    largest = max(needed.values())
    assert spread([pool.load_bytes(m) for m in "abc"]) <= largest
    fewest = len(needed)
    for homes in product("abc", repeat=len(needed)):
        loads = dict.fromkeys("abc", 0)
        for (_, nbytes), home in zip(needed.items(), homes, strict=True):
            loads[home] += nbytes
        if spread(list(loads.values())) <= largest:
            sent = sum(entry not in copies[home] for entry, home in zip(needed, homes, strict=True))
            fewest = min(fewest, sent)
    assert len(pool.lacking()) <= fewest + 1


class PoolMachine(RuleBasedStateMachine):
    """Machines come, go, grow and forget; entries come and go; fetches arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ParameterPool()
        self.capacities: dict[str, int] = {}
        self.copies: dict[str, set[str]] = {}
        self.needed: dict[str, int] = {}

    @rule(machine=st.sampled_from(MACHINES), capacity=st.sampled_from((0, 4, 10, 30)))
    def put(self, machine: str, capacity: int) -> None:
        self.pool.put_machine(machine, capacity)
        self.capacities[machine] = capacity
        self.copies.setdefault(machine, set())

    @rule(machine=st.sampled_from(MACHINES))
    def die(self, machine: str) -> None:
        if machine in self.capacities:
            self.pool.drop_machine(machine)
            del self.capacities[machine], self.copies[machine]

    @rule(entries=st.dictionaries(st.sampled_from("uvwxyz"), st.sampled_from(SIZES)))
    def need(self, entries: dict[str, int]) -> None:
        for gone in self.needed.keys() - entries.keys():
            self.pool.forget(gone)
        for entry, nbytes in entries.items():
            self.pool.need(entry, nbytes)
        self.needed = entries

    @rule(machine=st.sampled_from(MACHINES), copies=st.sets(st.sampled_from("uvwxyz")))
    def hold(self, machine: str, copies: set[str]) -> None:
        if machine in self.capacities:
            self.pool.set_copies(machine, copies)
            self.copies[machine] = copies

    @rule()
    def fetch_all(self) -> None:
        self.pool.settle()
        for entry, machine in self.pool.lacking().items():
            self.copies[machine] = self.copies[machine] | {entry}
            self.pool.set_copies(machine, self.copies[machine])
        self.pool.settle()
        assert not self.pool.lacking(), "nothing is moved again once everything is at home"

    @invariant()
    def everything_has_a_home_that_can_have_one(self) -> None:
        self.pool.settle()
        homes = {entry: self.pool.home_of(entry) for entry in self.needed}
        loads = dict.fromkeys(self.capacities, 0)
        for entry, home in homes.items():
            if home is not None:
                loads[home] += self.needed[entry]
        assert loads == {m: self.pool.load_bytes(m) for m in self.capacities}
        assert all(loads[m] <= self.capacities[m] for m in loads)
        for entry in self.pool.homeless():
            assert homes[entry] is None
            assert all(self.capacities[m] - loads[m] < self.needed[entry] for m in loads), "there was room"

    @invariant()
    def no_last_copy_may_leave(self) -> None:
        self.pool.settle()
        kept = {m: self.pool.kept_on(m) for m in self.capacities}
        assert all(kept[m] <= self.copies[m] for m in kept)
        for entry in self.needed:
            holders = {m for m in self.copies if entry in self.copies[m]}
            assert holders == self.pool.holders(entry)
            keepers = [m for m in kept if entry in kept[m]]
            assert len(keepers) == (1 if holders else 0), "one copy is kept, the others are spare"

    @invariant()
    def it_is_even_where_there_is_room(self) -> None:
        self.pool.settle()
        largest = max(self.needed.values(), default=0)
        for low, capacity in self.capacities.items():
            room = capacity - self.pool.load_bytes(low)
            for top in self.capacities:
                mine = [self.needed[e] for e in self.needed if self.pool.home_of(e) == top]
                if self.pool.load_bytes(top) - self.pool.load_bytes(low) > largest:
                    assert all(nbytes > room for nbytes in mine)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_death_moves_what_died_and_nothing_else() -> None:
    needed = {f"e{i}": 10 for i in range(12)}
    pool = pool_of(dict.fromkeys("abc", 1000), needed, {})
    for machine in "abc":
        pool.set_copies(machine, [e for e, home in pool.lacking().items() if home == machine])
    pool.set_copies("b", pool.kept_on("b") | {"e0"})
    pool.settle()
    before = {e: pool.home_of(e) for e in needed}
    assert sorted(map(pool.load_bytes, "abc")) == [40, 40, 40]
    dead = before["e0"]
    assert dead is not None
    pool.drop_machine(dead)
    assert pool.settle() and not pool.settle()
    assert [e for e in needed if pool.home_of(e) != before[e]] == [e for e in needed if before[e] == dead]
    fetched = set(pool.lacking())
    assert fetched == {e for e in needed if before[e] == dead} - ({"e0"} if dead != "b" else set())


def test_of_equal_machines_one_that_needs_nobody_else_is_the_home() -> None:
    for near in "abc":
        pool = ParameterPool()
        for machine in "abc":
            pool.put_machine(machine, 100)
        pool.need("e", 1, frozenset(near))
        pool.settle()
        assert pool.home_of("e") == near


def test_a_machine_that_is_not_there_is_no_keeper() -> None:
    pool = ParameterPool()
    with pytest.raises(KeyError):
        pool.set_copies("a", ["e"])
    pool.need("e", 1)
    assert pool.settle() and pool.home_of("e") is None and list(pool.homeless()) == ["e"]
