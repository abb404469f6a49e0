"""The bound by types: below every assignment, and above the mean where wide models leave no level one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.lending_map import Servers, least_imbalance_bytes
from prism.sim.lending_bound import bound_by_types
from tests.policy.test_lending_map import GPU, best_by_force, needs_of

fleets = st.tuples(
    st.lists(st.tuples(st.sampled_from([1, 1, 2, 3]), st.integers(-60, 60)), min_size=1, max_size=6), st.integers(1, 3)
)


@given(fleets)
def test_no_assignment_is_below_it(fleet: tuple[list[tuple[int, int]], int]) -> None:
    pairs, count = fleet
    needs, servers = needs_of(*pairs), Servers(count, 4, GPU)
    if sum(need.shards for need in needs) > 4 * count:
        return
    try:
        best = best_by_force(needs, servers)
    except ValueError:
        return  # wide models do not fit beside each other
    assert least_imbalance_bytes(needs, servers) <= bound_by_types(needs, servers, best) <= best
    assert bound_by_types(needs, servers, best + 7) <= best + 1e-3, "halving ends a little below what it cannot exclude"


def test_who_must_stand_beside_a_wide_model_counts() -> None:
    """Every server is level in number, so that the wide lender has all its borrowers beside it: they lack too much
    for it, and what others have left over is left over."""
    needs = needs_of((2, 10), (1, -40), (1, -40), (1, 50), (1, 50), (1, -20), (1, -20))
    servers = Servers(2, 4, GPU)
    best = best_by_force(needs, servers)
    assert least_imbalance_bytes(needs, servers) == 0 < best
    assert bound_by_types(needs, servers, best) == pytest.approx(20, abs=0.5)
    assert best == 20
