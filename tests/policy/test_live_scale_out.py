"""What a scheduler knows, as a case of the choice: when a further instance is paired, and when it comes whole."""

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
    assert choose_scale_out(FLOODED, SLOW, 2, 2, ()).way is ScaleWay.ZIGZAG
    assert choose_scale_out(FLOODED, SLOW, 2, 0, ()).way is ScaleWay.STOP, "on other machines there is no peer"
    assert ScaleWay.ZIGZAG not in choose_scale_out(replace(FLOODED, serving=0), SLOW, 2, 2, ()).met


def test_loads_that_take_no_time_are_not_worth_a_pair() -> None:
    assert choose_scale_out(FLOODED, ComingTimes(0.02, 0.01, 32), 2, 2, ()).way is ScaleWay.STOP


def test_what_the_load_asks_for_comes_in_the_simplest_way_even_if_everybody_is_in_time() -> None:
    light = replace(FLOODED, waiting=1, arrivals_per_s=2.0)
    assert choose_scale_out(light, SLOW, 2, 2, ()).way is ScaleWay.STOP
    enough = (0.0,) * 4
    assert choose_scale_out(FLOODED, SLOW, 2, 2, enough).way is ScaleWay.STOP, "those on their way suffice"


def test_capacity_is_wanted_even_if_it_comes_too_late_for_those_that_are_here() -> None:
    hopeless = replace(FLOODED, waiting=500, arrivals_per_s=0.0)
    assert choose_scale_out(hopeless, SLOW, 2, 0, ()).way is ScaleWay.STOP


def test_a_speed_that_nobody_has_seen_is_what_the_load_asks_for() -> None:
    unseen = replace(FLOODED, served_per_s=0.0)
    assert choose_scale_out(unseen, SLOW, 2, 2, ()).way is ScaleWay.ZIGZAG
    nothing = replace(unseen, waiting=0, arrivals_per_s=0.0)
    assert choose_scale_out(nothing, SLOW, 2, 2, ()).way is ScaleWay.STOP


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
)
@example(replace(FLOODED, serving=4, served_per_s=5e-324), SLOW, 1)
def test_any_load_has_a_way_that_can_be_gone(load: ScaleOutLoad, times: ComingTimes, new: int) -> None:
    choice = choose_scale_out(load, times, new, new, (0.1,))
    assert choice.way in choice.met and choice.met.keys() <= {ScaleWay.STOP, ScaleWay.ZIGZAG}
