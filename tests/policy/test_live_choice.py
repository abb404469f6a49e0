"""The choice of a mechanism: never worse than the others by its own estimate, and what each is good for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.live.choice import (
    LEAST_SOONER,
    SIMPLER,
    SOONER,
    Receiver,
    ScaleOutCase,
    ScaleWay,
    capacity_at,
    choose_scaling,
    outlook,
    paired_rate,
    requests_met,
    sharing,
)


def case(**more: object) -> ScaleOutCase:
    """One overloaded instance, two on their way for two seconds, one pipeline that is ready after one."""
    receivers = (Receiver(0.1, 2.0, 0), Receiver(0.1, 2.0, 0))
    known: dict[str, object] = {
        "receivers": receivers,
        "ready_s": {0: 1.0},
        "serving": 1,
        "overloaded": 1,
        "served_per_s": 10.0,
        "waiting": 20,
        "arrivals_per_s": 25.0,
        "objective_s": 1.0,
        "horizon_s": 4.0,
    }
    return ScaleOutCase(**{**known, **more})  # type: ignore[arg-type]


def cases() -> st.SearchStrategy[ScaleOutCase]:
    seat = st.builds(
        lambda first_s, more_s, pipeline: Receiver(first_s, first_s + more_s, pipeline),
        st.floats(0, 2),
        st.floats(0.01, 5),
        st.sampled_from([None, 0, 1]),
    )
    return st.builds(
        case,
        receivers=st.lists(seat, min_size=1, max_size=6).map(tuple),
        ready_s=st.fixed_dictionaries({0: st.floats(0, 5), 1: st.floats(0, 5)}),
        coming=st.lists(seat, max_size=2).map(tuple),
        serving=st.integers(0, 3),
        overloaded=st.integers(0, 3),
        waiting=st.integers(0, 50),
        arrivals_per_s=st.floats(0, 80),
        objective_s=st.floats(0.05, 3),
        horizon_s=st.floats(0.5, 10),
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_best_by_its_own_estimate_and_nothing_is_served_twice(one: ScaleOutCase) -> None:
    choice = choose_scaling(one)
    met = {way: of.met for way, of in choice.outlooks.items()}
    assert met[choice.way] >= SIMPLER * max(met.values())
    everybody = one.waiting + one.arrivals_per_s * one.horizon_s
    assert all(0 <= of_way <= everybody * (1 + 1e-9) for of_way in met.values())
    times = np.linspace(0.0, 20.0, 200)
    whole = (one.serving + len(one.receivers) + len(one.coming)) * one.served_per_s
    least = capacity_at(one, ScaleWay.WAIT, times)
    for way in ScaleWay:
        capacity = capacity_at(one, way, times)
        assert (capacity >= least - 1e-9).all(), "never below the old instances' alone"
        assert (capacity <= whole + 1e-9).all()
    assert (capacity_at(one, ScaleWay.PIPELINES, times) >= capacity_at(one, ScaleWay.STOP, times) - 1e-9).all()
    assert (capacity_at(one, ScaleWay.ZIGZAG, times) >= capacity_at(one, ScaleWay.STOP, times) - 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_of_ways_that_serve_as_many_the_one_whose_requests_wait_least_and_the_simplest_only_where_that_is_noise(
    one: ScaleOutCase, late_last: bool
) -> None:
    one = replace(one, late_last=late_last)
    choice = choose_scaling(one)
    most = max(of.met for of in choice.outlooks.values())
    alike = {way: of.wait_s for way, of in choice.outlooks.items() if of.met >= SIMPLER * most}
    noise_s = {way: max(SOONER * wait_s, LEAST_SOONER * one.objective_s) for way, wait_s in alike.items()}
    taken = alike[choice.way]
    assert all(taken - wait_s <= noise_s[choice.way] for wait_s in alike.values()), "nobody would wait for less"
    shortest_s = min(alike.values())
    simpler = list(alike)[: list(alike).index(choice.way)]
    assert all(alike[way] - shortest_s > noise_s[way] for way in simpler), "a simpler one is as good"


@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_waits_are_of_everybody_and_more_capacity_makes_nobody_wait_longer(one: ScaleOutCase, late_last: bool) -> None:
    one = replace(one, late_last=late_last)
    waits_s = {way: outlook(one, way).wait_s for way in ScaleWay}
    assert all(0.0 <= wait_s <= one.horizon_s + one.objective_s for wait_s in waits_s.values())
    assert not late_last or max(waits_s.values()) <= one.objective_s * 1.02 + 1e-9, "then it has given way"
    for way in (ScaleWay.STOP, ScaleWay.ZIGZAG, ScaleWay.PIPELINES):
        assert waits_s[way] <= waits_s[ScaleWay.WAIT] * (1 + 1e-9) + 1e-9
    assert waits_s[ScaleWay.ZIGZAG] <= waits_s[ScaleWay.STOP] * (1 + 1e-9) + 1e-9


def test_a_line_empties_at_what_is_served() -> None:
    """Ten wait for one that begins ten a second: half a second each, on average."""
    alone = case(waiting=10, arrivals_per_s=0.0, receivers=(Receiver(9.0, 9.0),), ready_s={})
    for late_last in (False, True):
        assert outlook(replace(alone, late_last=late_last), ScaleWay.STOP).wait_s == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("waiting", "way"), [(8, ScaleWay.ZIGZAG), (1, ScaleWay.STOP)])
def test_all_are_in_time_either_way_but_wait_for_less_beside_an_instance_that_serves(
    waiting: int, way: ScaleWay
) -> None:
    """What a scheduler knows when a burst has just begun: eight wait, and their objective is not at risk."""
    pair = (Receiver(0.3, 1.5), Receiver(0.3, 1.5))
    begun = case(receivers=pair, ready_s={}, waiting=waiting, arrivals_per_s=9.7, served_per_s=15.0, late_last=True)
    possible = (ScaleWay.STOP, ScaleWay.ZIGZAG)
    choice = choose_scaling(begun, possible=possible)
    assert len({round(of.met, 2) for of in choice.outlooks.values()}) == 1
    assert choice.way is way


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 40))
def test_more_that_waits_never_means_more_in_time_of_what_comes(one: ScaleOutCase, more: int) -> None:
    fuller = ScaleOutCase(**{f: getattr(one, f) for f in one.__slots__} | {"waiting": one.waiting + more})
    for way in ScaleWay:
        assert requests_met(fuller, way) <= requests_met(one, way) + more + 1e-6


@settings(max_examples=40, deadline=None)
@given(cases())
def test_letting_the_late_give_way_never_costs_anybody_in_time(one: ScaleOutCase) -> None:
    kind = replace(one, late_last=True)
    for way in ScaleWay:
        met = requests_met(kind, way)
        assert requests_met(one, way) - 0.02 * one.requests - 1.0 <= met <= one.requests * (1 + 1e-9)
    served = replace(kind, waiting=0, arrivals_per_s=0.5 * one.serving * one.served_per_s)
    assert requests_met(served, ScaleWay.WAIT) == pytest.approx(served.requests, rel=0.02)


def test_a_line_that_has_grown_too_long_does_not_make_everybody_after_it_late() -> None:
    """Twenty wait for what one serves in two seconds, and as many arrive as it can serve."""
    flooded = case(arrivals_per_s=10.0)
    assert requests_met(flooded, ScaleWay.WAIT) == pytest.approx(10.0, rel=0.05)
    assert requests_met(replace(flooded, late_last=True), ScaleWay.WAIT) == pytest.approx(50.0, rel=0.05)


def test_each_way_has_its_hour() -> None:
    assert choose_scaling(case(waiting=0, arrivals_per_s=5.0)).way is ScaleWay.WAIT
    coming = (Receiver(0.0, 0.01),) * 4
    assert choose_scaling(case(coming=coming)).way is ScaleWay.WAIT, "enough of them come already"
    fast = tuple(Receiver(0.01, 0.05, 0) for _ in range(2))
    assert choose_scaling(case(receivers=fast, ready_s={0: 0.04}, waiting=5)).way is ScaleWay.STOP
    assert choose_scaling(case(ready_s={0: 1.9})).way is ScaleWay.ZIGZAG, "one instance to lean on"
    assert choose_scaling(case(serving=0, overloaded=0)).way is ScaleWay.PIPELINES, "nobody to be paired with"


def test_a_forced_way_is_taken_and_the_estimates_are_told() -> None:
    choice = choose_scaling(case(), ScaleWay.WAIT)
    assert choice.way is ScaleWay.WAIT and choice.forced
    told = {f"met_{way.value}" for way in ScaleWay} | {f"wait_{way.value}_s" for way in ScaleWay}
    assert choice.as_numbers().keys() == {"way", *told}
    with pytest.raises(ValueError, match="needs instances that serve"):
        choose_scaling(case(served_per_s=0.0))


def test_shares_of_a_pipeline_and_a_pair() -> None:
    assert [round(n * sharing(n, 0.38), 2) for n in (0, 1, 2, 3)] == [0.0, 1.0, 1.45, 1.7]
    assert [paired_rate(s) for s in (0.0, 0.25, 0.5, 1.0)] == [0.0, pytest.approx(1 / 3), 1.0, 1.0]
