"""Choosing what leaves: enough, not more than needed, in the policy's order."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import Generation, ModelName
from prism.core.instances import InstanceKey
from prism.core.settings import EvictionOrder
from prism.policy.eviction import EvictionCandidate, choose_evictions, recovered_trust, trust_after


def _candidate(i: int, frees: int, idle: float = 10.0, slo: float = 1.0, left: float = 10.0) -> EvictionCandidate:
    return EvictionCandidate(InstanceKey(ModelName(f"m{i}"), Generation(1)), frees, idle, slo, left, 1.0)


candidates_strategy = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0.1, 100.0), st.floats(0.1, 10.0), st.floats(0.0, 100.0)), max_size=7
)


@given(candidates_strategy, st.integers(0, 150), st.sampled_from(list(EvictionOrder)))
def test_enough_leaves_and_nobody_needlessly(
    sizes: list[tuple[int, float, float, float]], need: int, order: EvictionOrder
) -> None:
    candidates = [_candidate(i, *size) for i, size in enumerate(sizes)]
    chosen = choose_evictions(candidates, need, order)
    if chosen is None:
        assert sum(c.frees_bytes for c in candidates) < need
        return
    freed = sum(c.frees_bytes for c in chosen)
    assert freed >= need
    assert all(freed - c.frees_bytes < need for c in chosen), "one of them could have stayed"
    assert chosen == choose_evictions(list(reversed(candidates)), need, order)


@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 10.0), st.floats(0.0, 100.0)), max_size=7))
def test_with_equal_sizes_the_least_regret_is_exact(sizes: list[tuple[float, float, float]]) -> None:
    candidates = [_candidate(i, 10, *size) for i, size in enumerate(sizes)]
    chosen = choose_evictions(candidates, 30, EvictionOrder.EXPECTED_IDLE)
    if chosen is not None:
        best = min(sum(c.regret for c in some) for some in combinations(candidates, 3))
        assert sum(c.regret for c in chosen) <= best * (1 + 1e-12)


def test_papers_order_is_larger_objective_then_longer_idle() -> None:
    a, b, c = _candidate(0, 10, 5.0, 1.0), _candidate(1, 10, 50.0, 1.0), _candidate(2, 10, 1.0, 3.0)
    assert choose_evictions([a, b, c], 10, EvictionOrder.PAPER) == (c,)
    assert choose_evictions([a, b], 10, EvictionOrder.PAPER) == (b,)


def test_models_in_use_leave_last() -> None:
    idle, used = _candidate(0, 10, left=0.1), _candidate(1, 10, left=1e6)._replace(in_use=True)
    for order in EvictionOrder:
        assert choose_evictions([used, idle], 10, order) == (idle,)


def test_what_leaves_anyway_is_counted_on_first_and_costs_nothing() -> None:
    leaving, idle = _candidate(0, 10, left=0.1)._replace(leaving=True, in_use=True), _candidate(1, 10, left=1e6)
    assert leaving.regret == 0.0
    for order in EvictionOrder:
        assert choose_evictions([idle, leaving], 10, order) == (leaving,)


def test_spare_instances_without_requests_leave_before_any_model_does() -> None:
    """However soon they would be of use; one that serves is weighed like the others."""
    model = _candidate(0, 10, left=1e9)
    idle_spare = _candidate(1, 10, left=0.1)._replace(spare=True)
    busy_spare = _candidate(2, 10, left=60.0)._replace(spare=True, requests=9)
    for order in EvictionOrder:
        assert choose_evictions([model, busy_spare, idle_spare], 10, order) == (idle_spare,)
    assert choose_evictions([model, busy_spare], 10, EvictionOrder.EXPECTED_IDLE) == (model,)
    assert idle_spare.regret == 0.0 < busy_spare.regret


@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.floats(0.0, 1e4)), max_size=30))
def test_trust_in_idleness_falls_with_early_returns_and_rises_with_late_ones(stays: list[tuple[float, float]]) -> None:
    trust = 1.0
    for expected_s, away_s in stays:
        after = trust_after(trust, expected_s, away_s)
        assert 0.05 <= after <= 1.0
        assert after >= trust if away_s >= expected_s else after <= max(trust, away_s / expected_s, 0.05)
        trust = after
    assert trust <= recovered_trust(trust, 10.0) <= recovered_trust(trust, 1000.0) <= 1.0


def test_a_model_that_is_back_at_once_three_times_is_believed_little() -> None:
    trust = 1.0
    for _ in range(3):
        trust = trust_after(trust, 100.0, 1.1)
    assert trust < 0.15
    assert recovered_trust(trust, 300.0) == (1.0 + trust) / 2
