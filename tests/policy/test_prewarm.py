"""When a model is expected back: by its own rhythm, and by what others are asked."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from prism.policy.demand import IdleIntervals
from prism.policy.prewarm import CHANCE_TO_EVICT, LEAST_CHANCE, Companions, chance_of_return, due_after_s, window_s

NOBODY = IdleIntervals()


def intervals(*lengths_s: float) -> IdleIntervals:
    found = IdleIntervals()
    for length_s in lengths_s:
        found.observe(length_s)
    return found


def test_a_model_that_comes_every_minute_is_expected_when_the_minute_is_nearly_over() -> None:
    own = intervals(*[60.0] * 20)
    assert chance_of_return(5.0, 10.0, own, NOBODY) == 0.0
    assert chance_of_return(55.0, 10.0, own, NOBODY) > 0.9
    due_s = due_after_s(0.0, 10.0, own, NOBODY)
    assert 50.0 <= due_s <= 60.0


def test_a_single_interval_drives_nobody_out() -> None:
    assert LEAST_CHANCE < chance_of_return(55.0, 10.0, intervals(60.0), NOBODY) <= CHANCE_TO_EVICT


def test_what_was_never_seen_is_never_due() -> None:
    assert due_after_s(0.0, 10.0, NOBODY, NOBODY) == math.inf
    own = intervals(*[60.0] * 20)
    assert chance_of_return(500.0, 10.0, own, NOBODY) == 0.0
    assert due_after_s(500.0, 10.0, own, NOBODY) == math.inf


def test_a_model_without_a_past_is_taken_for_one_like_the_others() -> None:
    pool = intervals(*[60.0] * 20)
    assert chance_of_return(55.0, 10.0, NOBODY, pool) == 0.75
    own = intervals(*[3600.0] * 20)
    assert chance_of_return(55.0, 10.0, own, pool) < LEAST_CHANCE, "its own past weighs more"


def test_the_window_leaves_time_for_slow_loads() -> None:
    assert window_s(0.1) == window_s(0.5) < window_s(30.0)
    assert window_s(30.0) > 30.0


lengths = st.lists(st.floats(0.6, 1e5), max_size=30)


@given(lengths, lengths, st.floats(0.0, 1e5), st.floats(0.0, 1e4), st.floats(0.0, 1e4))
@example([], [1.0, 18537.0, 13109.0, 26215.0], 3108.0, 10000.0, 0.0)
def test_the_chance_grows_with_the_window(
    own_s: list[float], all_s: list[float], idle_s: float, within_s: float, more_s: float
) -> None:
    own, pool = intervals(*own_s), intervals(*all_s)
    sooner = chance_of_return(idle_s, within_s, own, pool)
    later = chance_of_return(idle_s, within_s + more_s, own, pool)
    assert 0.0 <= sooner <= later + 1e-9 <= 1.0 + 2e-9


@given(lengths, lengths, st.floats(0.0, 1e5), st.floats(1.0, 1e3))
def test_what_is_due_is_expected_then(own_s: list[float], all_s: list[float], idle_s: float, within_s: float) -> None:
    own, pool = intervals(*own_s), intervals(*all_s)
    due_s = due_after_s(idle_s, within_s, own, pool)
    assert due_s >= idle_s
    if due_s < math.inf:
        assert chance_of_return(due_s, within_s, own, pool) >= LEAST_CHANCE


@given(st.lists(st.sampled_from([1.0, 8.0, 64.0, 512.0]), min_size=1, max_size=40), st.sampled_from([2.0, 20.0, 200.0]))
def test_alone_it_is_the_share_of_the_intervals(own_s: list[float], idle_s: float) -> None:
    """Lengths that no bin shares, and few enough that the older ones have hardly faded."""
    longer = [s for s in own_s if s > idle_s]
    soon = [s for s in longer if s <= idle_s + 100.0]
    expected = len(soon) / (len(longer) + 1)
    assert abs(chance_of_return(idle_s, 100.0, intervals(*own_s), NOBODY) - expected) < 0.1


def test_a_chain_of_models_is_known_after_a_few_rounds() -> None:
    companions = Companions()
    for at_s in (0.0, 100.0, 200.0):
        companions.on_return("draft", at_s)
        assert companions.after("draft") == ([] if at_s < 200.0 else [("judge", 1.0)])
        companions.on_return("judge", at_s + 4.0)
    assert companions.after("judge") == [], "what comes 96 s later is not used together with it"


def test_a_companion_that_stays_away_is_forgotten() -> None:
    companions = Companions()
    for turn in range(40):
        companions.on_return("draft", 100.0 * turn)
        if turn < 5:
            companions.on_return("judge", 100.0 * turn + 4.0)
        shares = dict(companions.after("draft"))
        if turn == 5:
            assert shares["judge"] == 1.0
    assert shares == {}


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0.0, 30.0)), max_size=200))
def test_shares_are_shares(returns: list[tuple[str, float]]) -> None:
    companions, now_s = Companions(), 0.0
    for model, pause_s in returns:
        now_s += pause_s
        companions.on_return(model, now_s)
        found = companions.after(model)
        assert all(LEAST_CHANCE <= share <= 1.0 and name != model for name, share in found)
        assert [share for _, share in found] == sorted((share for _, share in found), reverse=True)
