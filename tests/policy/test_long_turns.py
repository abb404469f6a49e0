"""A long request beside others: no more than its share of the time, all of it where nobody else wants any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.long_turns import LongTurns


def play(turns: LongTurns, long_s: list[float], other_s: float, steps: int) -> list[tuple[bool, float]]:
    """Steps while both have work: whose, and how long."""
    done: list[tuple[bool, float]] = []
    for number in range(steps):
        long = turns.may_go
        took_s = long_s[number % len(long_s)] if long else other_s
        turns.took(took_s, long)
        done.append((long, took_s))
    return done


@given(
    long_s=st.lists(st.floats(0.001, 10.0), min_size=1, max_size=8),
    other_s=st.floats(0.001, 1.0),
    share=st.sampled_from([0.1, 0.25, 0.5]),
    first=st.integers(0, 40),
)
def test_in_every_stretch_it_has_its_share_and_one_step_at_most(
    long_s: list[float], other_s: float, share: float, first: int
) -> None:
    steps = play(LongTurns(share), long_s, other_s, 300)[first:]
    long, all_s, longest = 0.0, 0.0, max(long_s)
    for ours, took_s in steps:
        all_s += took_s
        long += took_s * ours
        assert long <= share * all_s + longest + 1e-6


@given(long_s=st.floats(0.001, 10.0), other_s=st.floats(0.001, 1.0))
def test_it_always_goes_on(long_s: float, other_s: float) -> None:
    turns = LongTurns()
    turns.took(long_s, long=True)
    waits = play(turns, [long_s], other_s, int(3 * long_s / other_s) + 3)
    assert any(long for long, _ in waits)


def test_where_nobody_else_has_work_it_waits_for_nobody() -> None:
    turns = LongTurns()
    turns.took(5.0, long=True)
    assert not turns.may_go
    assert turns.owed_s == pytest.approx(15.0)
    turns.rested()
    assert turns.may_go
