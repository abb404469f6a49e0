"""Sliding rates and idle-interval distributions against the plain definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.demand import (
    IDLE_GAP_S,
    ExpectedRates,
    IdleIntervals,
    SlidingRate,
    expected_remaining_s,
    idle_threshold_s,
    is_idle_for_long,
)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 5)), max_size=60))
def test_the_rate_counts_the_window_to_within_one_bucket(steps: list[tuple[float, int]]) -> None:
    window_s, width_s = 60.0, 5.0
    rate, now, arrivals = SlidingRate(window_s), 0.0, []
    for gap_s, count in steps:
        now += gap_s
        rate.add(count, now)
        arrivals.append((now, count))
        counted = rate.per_s(now) * window_s
        surely = sum(c for at, c in arrivals if at > now - window_s + width_s)
        perhaps = sum(c for at, c in arrivals if at > now - window_s - width_s)
        assert surely - 1e-9 <= counted <= perhaps + 1e-9


def test_a_rate_fades_without_arrivals() -> None:
    rate = SlidingRate(60.0)
    assert rate.per_s(5.0) == 0.0
    rate.add(120, 100.0)
    assert rate.per_s(100.0) == pytest.approx(2.0)
    assert rate.per_s(1e6) == 0.0


def test_expected_rates_stand_for_what_the_window_has_not_seen() -> None:
    expected, measured = ExpectedRates({"a": 4.0}, 60.0), SlidingRate(60.0)
    assert expected.per_s("a", 1e6) == 4.0, "for as long as nobody has asked"
    assert expected.per_s("b", 0.0) == 0.0
    expected.saw_request(100.0)
    expected.saw_request(130.0)
    assert expected.per_s("a", 115.0) == pytest.approx(3.0)
    assert expected.per_s("a", 160.0) == expected.per_s("a", 1e6) == 0.0
    for second in range(100, 160):
        measured.add(4, float(second))
        together = measured.per_s(float(second)) + expected.per_s("a", float(second))
        assert together == pytest.approx(4.0, abs=0.5), "demand as expected: the sum does not move"


def _filled(*intervals_s: float) -> IdleIntervals:
    idle = IdleIntervals()
    for interval_s in intervals_s:
        idle.observe(interval_s)
    return idle


@given(st.lists(st.floats(0.06, 1e4), min_size=1, max_size=30), st.integers(0, 30))
def test_expected_remaining_time_is_the_mean_residual_life(intervals: list[float], step: int) -> None:
    """Exact at the bins' edges, but for the fading of old intervals (half a percent each)."""
    idle_s = 0.05 * 2.0 ** (step / 2)
    longer = [x for x in intervals if x > idle_s * 2**0.5]
    inside = [x for x in intervals if idle_s <= x <= idle_s * 2**0.5]
    if not longer or inside:
        return
    mean_s = sum(longer) / len(longer) - idle_s
    got_s = expected_remaining_s(idle_s, _filled(*intervals), IdleIntervals())
    spread_s = max(longer) - min(longer)
    assert got_s == pytest.approx(mean_s, abs=0.1 * spread_s + 1e-6 * mean_s + 1e-9)


def test_beyond_everything_seen_an_idle_time_lasts_as_long_again() -> None:
    assert expected_remaining_s(100.0, _filled(1.0, 2.0), IdleIntervals()) == 100.0
    assert expected_remaining_s(7.0, IdleIntervals(), IdleIntervals()) == 7.0


def test_a_model_without_history_is_judged_by_all_models() -> None:
    pool = _filled(*[30.0] * 20)
    assert expected_remaining_s(10.0, IdleIntervals(), pool) == pytest.approx(20.0)


def test_the_threshold_is_where_waiting_on_is_worth_two_activations() -> None:
    bimodal = _filled(*[1.0] * 30, *[300.0] * 10)
    threshold_s = idle_threshold_s(5.0, bimodal, IdleIntervals())
    assert threshold_s == IDLE_GAP_S, "on average 75 s are left from the start; what is shorter is no idle interval"
    mostly_short = _filled(*[1.0] * 200, *[300.0] * 2)
    threshold_s = idle_threshold_s(5.0, mostly_short, IdleIntervals())
    assert 0.5 < threshold_s < 2.0, "after the usual second is over, a long pause has begun"
    assert expected_remaining_s(threshold_s, mostly_short, IdleIntervals()) > 10.0


@given(
    st.floats(0.0, 1e6),
    st.sampled_from([0.05, 0.5, 5.0, 1e4, 1e7]),
    st.lists(st.floats(0.06, 5000.0), max_size=12),
    st.lists(st.floats(0.06, 5000.0), max_size=12),
)
def test_who_has_reached_the_threshold_is_told_without_looking_beyond(
    idle_s: float, activation_s: float, own: list[float], pool: list[float]
) -> None:
    threshold_s = idle_threshold_s(activation_s, _filled(*own), _filled(*pool))
    for asked_s in (idle_s, threshold_s):
        long = is_idle_for_long(asked_s, activation_s, _filled(*own), _filled(*pool))
        assert long == (asked_s >= threshold_s)


def test_old_habits_are_forgotten_and_the_sums_stay_finite() -> None:
    idle = _filled(*[1000.0] * 50, *[1.0] * 20_000)
    assert expected_remaining_s(0.0, idle, IdleIntervals()) == pytest.approx(1.0, rel=1e-3)
