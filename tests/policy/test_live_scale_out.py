"""What a scheduler knows, as a case of the choice: when a further instance is paired, and when it comes whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prism.policy.live.choice import ScaleWay
from prism.policy.live.pipelines import expected_pipelines
from prism.policy.live.scale_out import ComingTimes, ScaleOutLoad, choose_scale_out

SLOW = ComingTimes(whole_s=4.0, early_s=0.2, layers=32)
FLOODED = ScaleOutLoad(serving=1, wanted=3, waiting=20, arrivals_per_s=30.0, served_per_s=10.0, objective_s=1.0)


def test_loads_that_take_long_are_paired_where_somebody_stands_beside() -> None:
    assert choose_scale_out(FLOODED, SLOW, 2, 2, ()).way is ScaleWay.ZIGZAG
    assert choose_scale_out(FLOODED, SLOW, 2, 0, ()).way is ScaleWay.STOP, "on other machines there is no peer"
    assert ScaleWay.ZIGZAG not in choose_scale_out(replace(FLOODED, serving=0), SLOW, 2, 2, ()).outlooks


def test_many_at_once_from_several_sources_are_pipelines_and_hops_over_the_network_cost_them() -> None:
    """Eight come to two that serve: as pairs only two of them would serve before their weights are there."""
    load = replace(FLOODED, serving=2, waiting=100, arrivals_per_s=80.0, served_per_s=20.0, wanted=10)
    shares = expected_pipelines(2, 8)
    choice = choose_scale_out(load, SLOW, 8, 8, (), shares)
    assert choice.way is ScaleWay.PIPELINES
    assert choice.outlooks[ScaleWay.PIPELINES].met > choice.outlooks[ScaleWay.ZIGZAG].met
    far = choose_scale_out(load, replace(SLOW, hop_share=0.5), 8, 8, (), shares)
    assert all(far.outlooks[way].met < choice.outlooks[way].met for way in (ScaleWay.PIPELINES, ScaleWay.ZIGZAG))
    assert far.outlooks[ScaleWay.STOP] == choice.outlooks[ScaleWay.STOP]
    assert choose_scale_out(load, SLOW, 8, 8, ()).way is ScaleWay.ZIGZAG, "they cannot form any"


@pytest.mark.parametrize(("sources", "receivers"), [(1, 4), (2, 4), (4, 4), (3, 8), (8, 2)])
def test_pipelines_of_many_sources_are_ready_early(sources: int, receivers: int) -> None:
    shares = expected_pipelines(sources, receivers)
    assert sum(share.members for share in shares) == receivers
    groups = min(sources, receivers)
    assert all(0.0 < share.ready <= 1.0 for share in shares)
    assert (shares[0].members >= groups and shares[0].ready <= 1.5 / groups) or groups == 1


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
    st.builds(ComingTimes, st.floats(0, 30), st.none() | st.floats(0, 30), st.integers(0, 80), st.floats(0, 3)),
    st.integers(1, 8),
    st.integers(0, 4),
)
@example(replace(FLOODED, serving=4, served_per_s=5e-324), SLOW, 1, 0)
def test_any_load_has_a_way_that_can_be_gone(load: ScaleOutLoad, times: ComingTimes, new: int, sources: int) -> None:
    pipelines = expected_pipelines(sources, new) if sources else ()
    choice = choose_scale_out(load, times, new, new, (0.1,), pipelines)
    assert choice.way in choice.outlooks and (ScaleWay.PIPELINES in choice.outlooks) == bool(pipelines)
    assert ScaleWay.WAIT not in choice.outlooks
