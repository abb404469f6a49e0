"""A long request beside others: no more than its share of the time, all of it where nobody else wants any; its window's
memory goes round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.long_turns import WINDOW_STEPS, LongTurns, NeighbourTurns, WindowTurns


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


def test_the_window_gives_way_when_others_waited_for_so_many_steps_and_comes_back_behind_them() -> None:
    turns = WindowTurns()
    for _ in range(5 * WINDOW_STEPS):
        turns.stepped(())
    assert not turns.gives_way, "nobody lacks memory"
    for step in range(WINDOW_STEPS):
        assert not turns.gives_way, step
        turns.stepped(["a", "b"])
    assert turns.gives_way
    turns.gave_way(["a", "b"])
    assert not turns.may_take(["a", "b", "c"])
    assert not turns.may_take(["b", "c"])
    assert turns.may_take(["c"]), "who came later waits for the window"
    assert turns.may_take(["a", "c"]), "one that was let in and retracted does not go before it again"
    assert not turns.gives_way
    turns.stepped(["c"])
    turns.stays()
    assert not turns.gives_way


@given(
    arrivals=st.lists(st.integers(0, 3), min_size=200, max_size=200),
    steps=st.integers(1, 20),
    ends=st.integers(1, 30),
)
def test_with_the_memory_of_one_both_go_on(arrivals: list[int], steps: int, ends: int) -> None:
    """Either the window is there or others are, each for ``ends`` rounds; whoever waits is let in, a bounded number of
    rounds later."""
    turns, waiting, inside = WindowTurns(steps), dict[str, int](), dict[str, int]()
    window, without = True, 0
    for now, count in enumerate(arrivals):
        waiting |= {f"{now}-{i}": now for i in range(count)}
        inside = {name: until for name, until in inside.items() if until > now}
        if window:
            turns.stepped(waiting)
            if turns.gives_way:
                turns.gave_way(waiting)
                window, without = False, 0
                inside = dict.fromkeys(waiting, now + ends)
                waiting = {}
        else:
            without += 1
            window = turns.may_take(waiting) and not inside
        assert without <= ends
        assert all(now - since <= steps + ends for since in waiting.values())


def test_neighbours_get_the_windows_memory_behind_a_step_and_it_comes_back_when_they_have_it() -> None:
    turns = NeighbourTurns()
    turns.took()
    assert not turns.gives_way(wished=True), "a step at least"
    turns.stepped(2.0)
    assert not turns.gives_way(wished=False)
    assert turns.gives_way(wished=True)
    turns.gave_way(12.0)
    assert not turns.may_take(wished=True, now_s=13.0)
    assert turns.may_take(wished=False, now_s=13.0)
    turns.took()
    turns.stepped(2.0)
    assert turns.gives_way(wished=True), "another wish"


def test_a_wish_that_the_window_does_not_meet_leaves_it_some_steps() -> None:
    turns = NeighbourTurns()
    turns.took()
    turns.stepped(0.5)
    turns.gave_way(12.0)
    assert not turns.may_take(wished=True, now_s=12.0 + 0.5 * WINDOW_STEPS - 0.1)
    assert turns.may_take(wished=True, now_s=12.0 + 0.5 * WINDOW_STEPS), "away for as long as it comes back for"
    turns.took()
    for step in range(WINDOW_STEPS):
        assert not turns.gives_way(wished=True), step
        turns.stepped(0.5)
    assert turns.gives_way(wished=True)
    turns.stays()
    assert not turns.gives_way(wished=True)


@given(st.lists(st.booleans(), min_size=200, max_size=200), st.integers(1, 20))
def test_neighbours_and_the_long_request_both_go_on(wishes: list[bool], steps: int) -> None:
    """In rounds of a second. Whoever wishes newly gets the memory in the next round; the long request gets a step in
    every so many rounds, whatever is wished."""
    turns, there, rested, before = NeighbourTurns(steps), True, 0, False
    turns.took()
    for now, wished in enumerate(wishes):
        if there:
            turns.stepped(1.0)
            rested = 0
            gives_way = turns.gives_way(wished)
            assert gives_way or not wished or before, "a new wish waits for a step"
            if gives_way:
                turns.gave_way(now)
                there = False
        else:
            rested += 1
            if turns.may_take(wished, now):
                turns.took()
                there = True
        before = wished
        assert rested <= steps
