"""The lending map: objective and bound against brute force, the local search, the matching's stability."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.errors import InvalidValue
from prism.core.ids import ModelName
from prism.policy.lending_map import (
    MemoryNeed,
    Servers,
    assign_in_turn,
    check_fits,
    imbalance_bytes,
    least_count,
    least_imbalance_bytes,
    match_lenders,
)
from prism.policy.lending_pairs import PairSearch
from prism.policy.lending_search import improve

GPU = 80


def needs_of(*pairs: tuple[int, int]) -> list[MemoryNeed]:
    """(shards, spare bytes) each."""
    return [MemoryNeed(ModelName(f"m{i}"), shards, spare) for i, (shards, spare) in enumerate(pairs)]


def fits(needs: list[MemoryNeed], at: tuple[int, ...] | list[int], servers: Servers) -> bool:
    used = [0] * servers.count
    for need, server in zip(needs, at, strict=True):
        used[server] += need.shards
    return max(used) <= servers.gpus


def best_by_force(needs: list[MemoryNeed], servers: Servers) -> int:
    every = product(range(servers.count), repeat=len(needs))
    return min(imbalance_bytes(needs, at, servers) for at in every if fits(needs, at, servers))


small_fleets = st.tuples(
    st.lists(st.tuples(st.sampled_from([1, 1, 1, 2]), st.integers(-60, 60)), min_size=1, max_size=6),
    st.integers(1, 3),
)


@given(small_fleets)
def test_the_bound_is_below_every_assignment_and_the_search_never_worse_than_its_start(fleet) -> None:
    pairs, count = fleet
    needs, servers = needs_of(*pairs), Servers(count, 4, GPU)
    first = assign_in_turn(needs, servers)
    if first is None:
        return
    assert fits(needs, first, servers)
    found = improve(needs, first, servers)
    assert fits(needs, found, servers)
    best = best_by_force(needs, servers)
    assert least_imbalance_bytes(needs, servers) <= best
    assert best <= imbalance_bytes(needs, found, servers) <= imbalance_bytes(needs, first, servers)


@given(small_fleets)
def test_two_servers_are_dealt_as_evenly_as_they_can_be(fleet) -> None:
    pairs, _ = fleet
    needs, servers = needs_of(*pairs), Servers(2, 4, GPU)
    first = assign_in_turn(needs, servers)
    if first is None:
        return
    found = PairSearch(needs, first, servers).run(1 << 20)
    every = [at for at in product(range(2), repeat=len(needs)) if fits(needs, at, servers)]
    assert fits(needs, found, servers)
    assert squares(needs, found, servers) == min(squares(needs, at, servers) for at in every)
    assert found == first or squares(needs, found, servers) < squares(needs, first, servers)


def squares(needs: list[MemoryNeed], at: tuple[int, ...] | list[int], servers: Servers) -> tuple[int, float]:
    """By how many the counts are above the least possible, and how uneven the net memory is."""
    above, total = 0, 0.0
    for server in range(servers.count):
        mine = [need for need, there in zip(needs, at, strict=True) if there == server]
        above += max(0, sum(n.shards * n.sign for n in mine) - least_count(needs, servers))
        total += (sum(n.shards * n.spare_bytes for n in mine) / servers.gpu_bytes) ** 2
    return above, round(total, 6)


def test_a_wide_model_changes_places_with_four() -> None:
    """No exchange of two for two leads from one server's lenders to the other's."""
    needs = needs_of((4, 10), *[(1, 30)] * 4, *[(1, -10)] * 4, *[(1, -30)] * 4)
    at = [0, *[1] * 4, *[1] * 4, *[0] * 4]
    assert imbalance_bytes(needs, at, Servers(2, 8, GPU)) == 80
    assert imbalance_bytes(needs, improve(needs, at, Servers(2, 8, GPU)), Servers(2, 8, GPU)) == 0


def test_lenders_and_borrowers_are_paired_over_servers() -> None:
    needs = needs_of((1, 40), (1, 40), (1, -40), (1, -40))
    servers = Servers(2, 2, GPU)
    at = assign_in_turn(needs, servers)
    assert at is not None
    assert imbalance_bytes(needs, at, servers) == 0
    assert {at[0], at[1]} == {at[2], at[3]} == {0, 1}


def test_many_lenders_for_one_borrower_count_as_uneven_though_the_bytes_are_level() -> None:
    needs = needs_of((1, 20), (1, 20), (1, -40), (1, 40), (1, -20), (1, -20))
    level = [0, 0, 0, 1, 1, 1]
    assert imbalance_bytes(needs, level, Servers(2, 3, GPU)) == GPU


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(InvalidValue, match="8 devices of one server"):
        check_fits(needs_of((8, 0)), Servers(4, 4, GPU))
    with pytest.raises(InvalidValue, match="9 devices are needed, 2 x 4"):
        check_fits(needs_of(*[(1, 0)] * 9), Servers(2, 4, GPU))


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(-50, 50)), max_size=8))
def test_the_matching_is_stable_and_complete(pairs: list[tuple[int, int]]) -> None:
    needs = needs_of(*pairs)
    matched = match_lenders(needs)
    borrowers = {n.model: n for n in needs if n.spare_bytes < 0}
    lenders = {n.model: n for n in needs if n.spare_bytes > 0}
    asked, there = sum(n.shards for n in borrowers.values()), sum(n.shards for n in lenders.values())
    assert len(matched) == min(asked, there)
    for pair in matched:
        assert pair.nbytes == min(-borrowers[pair.borrower].spare_bytes, lenders[pair.lender].spare_bytes)
    for name, need in borrowers.items():
        have = [p for p in matched if p.borrower == name]
        worst = max((_distance(need, lenders[p.lender]) for p in have), default=(True, 1 << 60))
        if len(have) < need.shards:
            worst = (True, 1 << 60)
        for other in lenders.values():
            if _distance(need, other) < worst:  # it would rather have this one, which must then be as well served
                held = [p.nbytes for p in matched if p.lender == other.model]
                assert len(held) == other.shards
                assert min(held) >= min(-need.spare_bytes, other.spare_bytes)


def _distance(borrower: MemoryNeed, lender: MemoryNeed) -> tuple[bool, int]:
    left = lender.spare_bytes + borrower.spare_bytes
    return left < 0, abs(left)


def test_a_shard_of_each_rank_is_matched_by_itself() -> None:
    matched = match_lenders(needs_of((2, -30), (1, 40), (1, 35)))
    assert sorted(p.lender for p in matched) == ["m1", "m2"]
