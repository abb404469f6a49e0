"""How many instances a load asks for, and how long bursts are remembered."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.replicas import ModelLoad, PeakHold, instances_needed

CALM = ModelLoad(1, 10, 0, False, 5.0, 5.0, 5.0, 2.0, float("inf"))
loads = st.builds(
    ModelLoad,
    st.integers(1, 8),
    st.integers(0, 500),
    st.integers(0, 500),
    st.booleans(),
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
    st.floats(0.0, 20.0),
    st.floats(1.0, 500.0) | st.just(float("inf")),
)


def test_a_calm_model_needs_one() -> None:
    assert instances_needed(CALM) == 1


@given(loads)
def test_no_instance_runs_more_than_its_room_and_none_too_many_is_asked_for(load: ModelLoad) -> None:
    needed = instances_needed(load._replace(hot=False))
    here = max(load.running + load.waiting, load.arrivals_per_s * load.residence_s)
    assert needed >= 1
    assert here / needed <= 0.8 * load.room * (1 + 1e-6)
    assert needed == 1 or here / (needed - 1) > 0.8 * load.room * (1 - 1e-6)


@given(loads, st.integers(0, 100), st.floats(0.0, 50.0))
def test_more_load_never_needs_fewer(load: ModelLoad, more: int, faster: float) -> None:
    heavier = load._replace(waiting=load.waiting + more, arrivals_per_s=load.arrivals_per_s + faster)
    assert instances_needed(heavier) >= instances_needed(load)
    hot = load._replace(hot=True)
    assert instances_needed(hot) >= min(2 * load.instances, load.instances + max(1, load.waiting // 2))
    assert instances_needed(hot) >= instances_needed(load)


def test_a_burst_asks_for_all_at_once() -> None:
    """Eight times as many arrive as are served: eight times as many instances, not one more."""
    burst = CALM._replace(hot=True, waiting=40, arrivals_per_s=60.0, served_per_s=7.5, usual_per_s=60.0)
    assert instances_needed(burst) == 8
    began = burst._replace(served_per_s=60.0, usual_per_s=7.5)
    assert instances_needed(began) == 8, "so far all were served"
    assert instances_needed(began._replace(waiting=6)) == 4, "three of them are not a burst that fills eight"


@given(st.lists(st.tuples(st.floats(0.01, 400.0), st.floats(0.0, 9.0)), min_size=1, max_size=40))
def test_a_peak_is_ask_again_in_the_span_and_forgotten_after_two(steps: list[tuple[float, float]]) -> None:
    hold, now_s, seen, span_s = PeakHold(100.0), 0.0, [], 100.0
    for pause_s, value in steps:
        now_s += pause_s
        hold.note(value, now_s)
        seen.append((now_s, value))
        least = max(v for at, v in seen if at > now_s - span_s)
        most = max(v for at, v in seen if at > now_s - 2 * span_s)
        assert least <= hold.peak(now_s) <= most
    assert hold.peak(now_s + 2 * span_s) == 0.0
    assert not math.isnan(hold.peak(now_s + 5 * span_s))
