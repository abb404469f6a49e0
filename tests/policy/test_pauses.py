"""Which engines stand still so that more answers keep their time per token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.device_time import slowdown
from prism.policy.pauses import AHEAD, Stepping, Turn, all_run_for_s, due_in_s, kept_due_s, may_matter, turns

STEP_S = 0.01
singles = st.builds(
    Stepping, st.floats(0.002, 0.02), st.floats(0.1, 1.0), st.tuples(st.floats(-0.2, 2.0)), st.just(False)
)
crowds = st.builds(
    Stepping,
    st.floats(0.002, 0.02),
    st.floats(0.1, 1.0),
    st.lists(st.one_of(st.floats(-0.2, 2.0), st.just(math.inf)), min_size=1, max_size=4).map(tuple),
    st.booleans(),
)


def bears(times: float, share: float = 0.7, answers: int = 1, must_run: bool = False) -> Stepping:
    """Its answers may take so many times as long as alone from now on."""
    return Stepping(STEP_S, share, (times * AHEAD * STEP_S,) * answers, must_run)


def in_order(engines: list[tuple[float, Stepping]]) -> bool:
    """Whether the work of all is done by its due times, one after the other."""
    at_s = 0.0
    for due_s, engine in sorted(engines, key=lambda e: e[0]):
        at_s += AHEAD * engine.step_s * engine.share
        if at_s > due_s + 1e-9:
            return False
    return True


def test_due_times_count_tokens_and_the_objective() -> None:
    assert due_in_s(10, 0.5, 0.02) == pytest.approx((10 + AHEAD) * 0.02 - 0.5)


def test_two_keep_their_time_where_three_would_all_be_too_slow() -> None:
    assert turns([bears(2.04), bears(2.04)]) == [Turn.RUNS] * 2
    assert turns([bears(2.2), bears(2.2), bears(2.2)]) == [Turn.RUNS] * 3
    assert sorted(turn.value for turn in turns([bears(2.04), bears(2.04), bears(2.04)])) == ["given_up", "runs", "runs"]


def test_who_bears_it_stands_still_for_who_does_not() -> None:
    assert turns([bears(1.5), bears(4.0), bears(1.6)]) == [Turn.RUNS, Turn.BEARS_IT, Turn.RUNS]


def test_one_answer_gives_way_to_two() -> None:
    assert turns([bears(1.1), bears(1.5, answers=2), bears(1.5, answers=2)]) == [Turn.GIVEN_UP, Turn.RUNS, Turn.RUNS]


def test_who_stood_still_for_as_long_as_it_may_runs() -> None:
    found = turns([bears(2.04), bears(2.04), bears(9.0, must_run=True)])
    assert found[2] is Turn.RUNS


@given(st.lists(singles, max_size=7))
def test_as_many_single_answers_are_kept_as_any_choice_could(engines: list[Stepping]) -> None:
    could = [(e.due_s[0], e) for e in engines if e.due_s[0] >= AHEAD * e.step_s]
    choices = chain.from_iterable(combinations(could, n) for n in range(len(could) + 1))
    most = max(len(choice) for choice in choices if in_order(list(choice)))
    assert sum(due < math.inf for due in kept_due_s(engines)) == most


@given(st.lists(crowds, max_size=6))
def test_what_is_kept_is_done_in_time(engines: list[Stepping]) -> None:
    kept = [(due, e) for due, e in zip(kept_due_s(engines), engines, strict=True) if due < math.inf]
    assert in_order(kept)
    assert all(due in e.due_s and due >= AHEAD * e.step_s for due, e in kept)


@given(st.lists(crowds, max_size=6))
def test_the_bandwidth_is_used_up_and_nobody_stands_still_for_nothing(engines: list[Stepping]) -> None:
    found = turns(engines)
    total = sum(e.share for e in engines)
    running = sum(e.share for e, turn in zip(engines, found, strict=True) if turn is Turn.RUNS)
    assert running >= min(0.999, total) - 1e-9
    dues_s = kept_due_s(engines)
    assert all(t is not Turn.BEARS_IT or due < math.inf for t, due in zip(found, dues_s, strict=True))
    if all(
        slowdown(total) * AHEAD * e.step_s <= due or due == math.inf for e, due in zip(engines, dues_s, strict=True)
    ):
        assert found == [Turn.RUNS] * len(engines)
    assert all(turn is Turn.RUNS for e, turn in zip(engines, found, strict=True) if e.must_run)


@given(st.lists(crowds, max_size=6), st.floats(0.0, 1.0))
def test_all_run_for_as_long_as_that_is_certain_even_if_nobody_gets_a_token(
    engines: list[Stepping], part: float
) -> None:
    for_s = all_run_for_s(engines)
    later_s = 0.0 if math.isinf(for_s) else part * for_s * 0.999
    late = [replace(e, due_s=tuple(due - later_s for due in e.due_s)) for e in engines]
    if for_s > 0.0:
        assert turns(late) == [Turn.RUNS] * len(engines)


@given(st.lists(crowds, max_size=6))
def test_where_it_cannot_matter_all_run(engines: list[Stepping]) -> None:
    if not may_matter([e.share for e in engines]):
        assert turns(engines) == [Turn.RUNS] * len(engines)


def test_who_is_too_late_counts_again_when_it_could_have_caught_up() -> None:
    late = Stepping(STEP_S, 0.7, (0.2,), objective_s=0.028)
    ahead = bears(9.0)
    assert all_run_for_s([late, ahead]) == pytest.approx(0.1 / (0.028 / (1.4 * STEP_S) - 1.0))
    assert all_run_for_s([replace(late, objective_s=0.013), ahead]) == pytest.approx(AHEAD * STEP_S * (9.0 - 1.4))
    assert all_run_for_s([]) == math.inf
