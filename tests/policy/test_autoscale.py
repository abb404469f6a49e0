"""Scaling up by what the load needs, down one at a time; learning what an instance can do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.autoscale import AutoScaler, CapacityEstimate, ScaleBounds

BOUNDS = ScaleBounds(upper=0.9, lower=0.5, down_after_s=2.0)


@given(st.integers(1, 20), st.floats(0.0, 10.0))
def test_up_at_once_to_where_the_load_is_below_the_bound(instances: int, load: float) -> None:
    target = AutoScaler(BOUNDS).decide_target(0.0, instances, load)
    if load <= BOUNDS.upper:
        assert target == instances
    else:
        assert target > instances
        assert instances * load / target <= BOUNDS.upper * (1 + 1e-9) or target == instances + 1
        assert target == instances + 1 or instances * load / (target - 1) > BOUNDS.upper * (1 - 1e-9)


def test_down_one_at_a_time_after_a_while() -> None:
    scaler = AutoScaler(BOUNDS)
    assert [scaler.decide_target(t, 4, 0.1) for t in (0.0, 1.9, 2.0, 2.1, 4.0)] == [4, 4, 3, 4, 3]


def test_a_peak_starts_the_wait_anew() -> None:
    scaler = AutoScaler(BOUNDS)
    assert [scaler.decide_target(t, 2, load) for t, load in ((0.0, 0.1), (1.0, 0.4), (2.5, 0.1), (4.0, 0.1))] == [
        2,
        2,
        2,
        2,
    ]
    assert scaler.decide_target(4.5, 2, 0.1) == 1


@given(st.lists(st.floats(0.0, 0.9), min_size=1, max_size=50))
def test_the_last_instance_is_never_taken(loads: list[float]) -> None:
    scaler = AutoScaler(BOUNDS)
    assert all(scaler.decide_target(float(t), 1, load) == 1 for t, load in enumerate(loads))


def test_no_oscillation_at_a_steady_load() -> None:
    """What was scaled up for is not scaled down again at the same load."""
    for demand in (0.5, 0.95, 1.7, 2.4, 3.3, 7.9):
        scaler, instances, history = AutoScaler(BOUNDS), 1, []
        for t in range(100):
            instances = scaler.decide_target(float(t), instances, demand / instances)
            history.append(instances)
        assert history[5:] == sorted(history[5:]), demand


def test_capacity_is_learned_while_requests_wait() -> None:
    capacity = CapacityEstimate()
    assert capacity.observe_load(1, 3.0, running=10, waiting=0) == 0.0, "nobody knows how much more would fit"
    assert capacity.observe_load(1, 30.0, running=10, waiting=20) == pytest.approx(3.0)
    assert capacity.observe_load(3, 24.0, running=20, waiting=0) == pytest.approx(0.8), (
        "three instances of 10 requests/s"
    )
