"""What a scheduler knows, as a case of the choice: when a further instance is paired, comes whole, or does not come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prism.policy.live.choice import ScaleWay
from prism.policy.live.scale_out import ComingTimes, ScaleOutLoad, choose_scale_out

SLOW = ComingTimes(whole_s=4.0, early_s=0.2, layers=32)
FLOODED = ScaleOutLoad(serving=1, wanted=3, waiting=20, arrivals_per_s=30.0, served_per_s=10.0, objective_s=1.0)


def test_loads_that_take_long_are_paired_where_somebody_stands_beside() -> None:
    assert choose_scale_out(FLOODED, SLOW, 2, 2, (), True).way is ScaleWay.ZIGZAG
    assert choose_scale_out(FLOODED, SLOW, 2, 0, (), True).way is ScaleWay.STOP, "on other machines there is no peer"
    assert ScaleWay.ZIGZAG not in choose_scale_out(replace(FLOODED, serving=0), SLOW, 2, 2, (), True).met


def test_loads_that_take_no_time_are_not_worth_a_pair() -> None:
    assert choose_scale_out(FLOODED, ComingTimes(0.02, 0.01, 32), 2, 2, (), True).way is ScaleWay.STOP


def test_what_would_not_help_does_not_come_unless_an_operator_wants_it() -> None:
    light = replace(FLOODED, waiting=1, arrivals_per_s=2.0)
    assert choose_scale_out(light, SLOW, 2, 2, (), True).way is ScaleWay.WAIT
    assert choose_scale_out(light, SLOW, 2, 2, (), False).way is ScaleWay.STOP
    enough = (0.0,) * 4
    assert choose_scale_out(FLOODED, SLOW, 2, 2, enough, True).way is ScaleWay.WAIT, "those on their way suffice"


def test_capacity_is_wanted_even_if_it_comes_too_late_for_those_that_are_here() -> None:
    hopeless = replace(FLOODED, waiting=500, arrivals_per_s=0.0)
    assert choose_scale_out(hopeless, SLOW, 2, 0, (), True).way is ScaleWay.STOP


def test_a_speed_that_nobody_has_seen_is_what_the_load_asks_for() -> None:
    unseen = replace(FLOODED, served_per_s=0.0)
    assert choose_scale_out(unseen, SLOW, 2, 2, (), True).way is ScaleWay.ZIGZAG
    nothing = replace(unseen, waiting=0, arrivals_per_s=0.0)
    assert choose_scale_out(nothing, SLOW, 2, 2, (), False).way is ScaleWay.STOP


@pytest.mark.parametrize(("early_s", "first_s"), [(None, 4.0 * 3 / 34), (0.2, 0.2), (9.0, 4.0)])
def test_when_an_instance_can_begin(early_s: float | None, first_s: float) -> None:
    assert ComingTimes(4.0, early_s, 32).first_s == pytest.approx(first_s)


@given(
    st.builds(
        ScaleOutLoad,
        serving=st.integers(0, 4),
        wanted=st.integers(1, 8),
        waiting=st.integers(0, 100),
        arrivals_per_s=st.floats(0, 100),
        served_per_s=st.floats(0, 50),
        objective_s=st.floats(0.01, 10),
    ),
    st.builds(ComingTimes, st.floats(0, 30), st.none() | st.floats(0, 30), st.integers(0, 80)),
    st.integers(1, 8),
    st.booleans(),
)
@example(replace(FLOODED, serving=4, served_per_s=5e-324), SLOW, 1, False)
def test_any_load_has_a_way_that_can_be_gone(load: ScaleOutLoad, times: ComingTimes, new: int, may_wait: bool) -> None:
    choice = choose_scale_out(load, times, new, new, (0.1,), may_wait)
    assert choice.way in choice.met and ScaleWay.PIPELINES not in choice.met
    assert may_wait or ScaleWay.WAIT not in choice.met
