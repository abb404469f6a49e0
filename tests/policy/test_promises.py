"""Who may begin beside those that run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.promises import Decoder, Entrant, chance, crowd_for, kept, may_begin

shares = st.floats(0.05, 1.0)
decoders = st.builds(
    Decoder, shares, st.floats(1.0, 6.0), st.integers(0, 8), st.just(1.0), st.floats(1.0, 9.0), st.booleans()
)


def runs(share: float, bearable: float, promised: int, rest_s: float = 1.0, lasts_s: float = 1.0) -> Decoder:
    return Decoder(share, bearable, promised, rest_s, lasts_s)


def entrant(share: float, bearable: float = 9.0, gain: int = 1, can_wait: bool = True) -> Entrant:
    return Entrant(runs(share, bearable, 0), None, gain, can_wait)


def test_the_first_begins_whatever_comes_of_it() -> None:
    assert may_begin(entrant(1.0, bearable=1.0, gain=0), [])


def test_it_waits_where_it_would_make_those_slow_that_are_in_time() -> None:
    assert may_begin(entrant(0.7), [runs(0.7, 1.5, 3)])
    assert not may_begin(entrant(0.9), [runs(0.7, 1.5, 3)])
    assert may_begin(entrant(0.9), [runs(0.7, 1.5, 0)])  # it runs nothing that could be in time


def test_it_waits_where_it_would_be_too_slow_itself() -> None:
    assert not may_begin(entrant(0.9, bearable=1.3), [runs(0.7, 9.0, 0)])


def test_when_it_cannot_wait_any_longer_it_takes_its_chance_where_it_harms_less() -> None:
    assert may_begin(entrant(0.9, bearable=1.3, can_wait=False), [runs(0.7, 9.0, 0)])
    assert not may_begin(entrant(0.9, bearable=1.3, can_wait=False), [runs(0.7, 1.5, 1)])


def test_when_it_cannot_wait_any_longer_numbers_decide() -> None:
    there = [runs(0.7, 1.5, 3)]
    assert not may_begin(entrant(0.9, gain=1, can_wait=False), there)
    assert may_begin(entrant(0.9, gain=2, can_wait=False), there)
    assert not may_begin(entrant(0.9, gain=2), there)


def test_what_is_too_late_anyway_breaks_nothing() -> None:
    there = [runs(0.7, 1.5, 1)]
    assert not may_begin(entrant(0.9, gain=0, can_wait=False), there)
    assert may_begin(entrant(0.3, gain=0, can_wait=False), there)


def test_one_more_in_a_batch_counts_with_the_whole_batch() -> None:
    was, then = runs(0.6, 3.0, 5), runs(0.7, 1.2, 5)
    assert not may_begin(Entrant(then, was, 1, can_wait=True), [runs(0.6, 9.0, 0)])


def test_who_ends_soon_counts_for_a_part_of_the_time() -> None:
    ends, stays = runs(0.8, 9.0, 0, rest_s=0.1, lasts_s=0.1), runs(0.8, 9.0, 0)
    assert crowd_for(runs(0.7, 9.0, 0), [ends]) < crowd_for(runs(0.7, 9.0, 0), [stays]) == 1.5
    assert may_begin(entrant(0.7, bearable=1.3), [ends])
    assert not may_begin(entrant(0.7, bearable=1.3), [stays])


def test_where_nobody_else_waits_it_is_not_lost_for_those_who_end_soon() -> None:
    there = [runs(0.8, 1.5, 1, rest_s=1.0, lasts_s=1.0)]
    soon = Entrant(runs(0.8, 1.0, 0, rest_s=4.0, lasts_s=4.0), None, 1, can_wait=False)
    assert not may_begin(soon, there)
    assert may_begin(soon._replace(followed=False), there)
    assert not may_begin(soon._replace(followed=False, can_wait=True), there)


@given(st.lists(decoders, min_size=1, max_size=6), decoders, st.integers(0, 8), st.booleans())
def test_what_begins_loses_less_than_it_gains(there: list[Decoder], one: Decoder, gain: int, can_wait: bool) -> None:
    """Of what is expected to be in time, whatever begins beside others: itself, and those that follow it where it
    cannot wait, weigh more than the promises lost."""
    fresh = one._replace(promised=0)
    if may_begin(Entrant(fresh, None, gain, can_wait), there):
        turns = gain > 0
        before = kept(there, turns=turns)
        worth = (1 if can_wait else gain) * chance(fresh, there, turns=turns)
        assert before - kept([*there, fresh], turns=turns) <= (worth if gain else 0.05 * max(1.0, before))


@given(decoders, st.lists(decoders, max_size=4), decoders)
def test_chances_are_chances_and_fall_with_the_crowd(one: Decoder, there: list[Decoder], more: Decoder) -> None:
    assert 0.0 <= chance(one, [*there, more]) <= chance(one, there) <= 1.0


@given(st.lists(decoders, max_size=6), decoders)
def test_where_the_device_has_bandwidth_for_all_nobody_waits(there: list[Decoder], one: Decoder) -> None:
    if sum(d.share for d in there) + one.share <= 1.0:
        assert may_begin(Entrant(one._replace(promised=0), None, 0, True), there)


def in_turns(share: float, bearable: float, promised: int = 1) -> Decoder:
    return runs(share, bearable, promised)._replace(yields=True)


def test_three_that_stand_still_for_each_other_bear_each_other() -> None:
    three = [in_turns(0.7, 2.04) for _ in range(3)]
    assert kept(three) < 2.0 < kept(three, turns=True)
    assert may_begin(Entrant(three[0]._replace(promised=0), None, 1, can_wait=True), three[1:])
    assert not may_begin(Entrant(three[0]._replace(promised=0, yields=False), None, 1, can_wait=True), three[1:])


def test_four_do_not() -> None:
    four = [in_turns(0.7, 2.04) for _ in range(4)]
    for can_wait in (True, False):
        assert not may_begin(Entrant(four[0]._replace(promised=0), None, 1, can_wait), four[1:])


def test_who_bears_more_makes_room_for_who_bears_less() -> None:
    urgent, bears, other = in_turns(0.7, 1.5), in_turns(0.7, 4.0), in_turns(0.7, 4.0)
    assert chance(urgent, [bears, other]) < 0.2 < 0.5 < chance(urgent, [bears, other], turns=True)
    stays = bears._replace(yields=False)
    assert chance(urgent, [stays, stays], turns=True) == chance(urgent, [stays, stays])


def test_nobody_stands_still_where_the_others_leave_bandwidth() -> None:
    """Of two engines neither does, and one of many answers never for long enough."""
    two = [in_turns(0.7, 1.2), in_turns(0.7, 4.0)]
    assert chance(two[0], two[1:], turns=True) == chance(two[0], two[1:])
    many, rest = in_turns(0.7, 1.5, promised=5), [in_turns(0.7, 4.0), in_turns(0.7, 4.0)]
    assert chance(many, rest, turns=True) == chance(many, rest)


def test_what_is_too_late_does_not_make_others_stand_still() -> None:
    others = [in_turns(0.7, 2.04), in_turns(0.7, 2.04)]
    assert not may_begin(Entrant(in_turns(0.7, 2.04, 0), None, 0, can_wait=False), others)


@given(st.lists(decoders, min_size=1, max_size=6), st.booleans())
def test_turns_only_help(there: list[Decoder], yields: bool) -> None:
    those = [d._replace(yields=yields) for d in there]
    assert kept(those) <= kept(those, turns=True) <= sum(d.promised for d in those)
    if not yields:
        assert kept(those) == kept(those, turns=True)
