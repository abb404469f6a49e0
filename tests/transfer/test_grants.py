"""One pull at a time, in the plan's order, which bends only where keeping it would stall."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from prism.transfer.grants import EXTRA_EVERY, UNKNOWN_SLOW_S, Grants, Pull

PLAN: list[Pull] = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def grants(held: set[int] | None = None, piece_s: float = 0.1) -> Grants:
    return Grants(lambda piece: held is None or piece in held, piece_s, PLAN)


def test_the_plans_order_and_one_at_a_time() -> None:
    made = grants()
    for pull in reversed(PLAN):
        made.ask(pull, 0.0)
    now, order = 0.0, []
    for _ in PLAN:
        pull = made.grant_next(now)
        assert pull is not None
        assert made.grant_next(now) is None, "two at once"
        order.append(pull)
        now += 0.1
        made.end(pull, now, complete=True)
    assert order == PLAN
    assert made.grant_next(now) is None
    assert made.waiting == 0


def test_who_is_near_neither_waits_for_the_link_nor_keeps_others_waiting() -> None:
    """What goes over links of its own says nothing of the network's either."""
    held = {0}
    made = Grants(lambda piece: piece in held)
    made.follow([("beside", 0), ("a", 0), ("beside", 1), ("a", 1)], 0.1, near=["beside"])
    made.ask(("a", 0), 0.0)
    assert made.grant_next(0.0) == ("a", 0), "the one before it in the plan has not asked"
    slow_s = made.slow_s
    for piece in (0, 1):
        made.ask(("beside", piece), 0.0)
    assert made.quiet_s(0.0) == 0.0
    assert made.grant_next(0.0) == ("beside", 0) and made.grant_next(0.0) is None, "the other piece is not here"
    assert made.waiting == 1
    made.end(("beside", 0), 0.001, complete=True)
    held.add(1)
    assert made.grant_next(0.001) == ("beside", 1)
    made.end(("beside", 1), 0.002, complete=True)
    assert made.slow_s == slow_s
    made.ask(("a", 1), 0.1)
    made.end(("a", 0), 0.1, complete=True)
    assert made.grant_next(0.1) == ("a", 1)


def test_the_next_of_the_plan_is_waited_for_but_not_for_ever() -> None:
    made = grants()
    made.ask(("b", 0), 0.0)  # ("a", 0) comes first, but a has not asked
    assert made.grant_next(0.0) is None
    assert made.grant_next(made.patience_s * 0.9) is None
    assert made.grant_next(made.patience_s * 1.1) == ("b", 0)
    made.end(("b", 0), 1.0, complete=True)
    made.ask(("b", 1), 1.0)
    assert made.grant_next(1.0) == ("b", 1), "a is late and is not waited for again"


def test_a_late_receiver_that_asks_is_in_order_again() -> None:
    made = grants()
    made.ask(("b", 0), 0.0)
    assert made.grant_next(1.0) == ("b", 0)
    made.ask(("a", 0), 1.0)
    made.ask(("b", 1), 1.0)
    made.end(("b", 0), 1.1, complete=True)
    assert made.grant_next(1.1) == ("a", 0)


def test_what_a_receiver_left_out_is_not_waited_for() -> None:
    made = grants()
    made.ask(("a", 1), 0.0)  # it has ("a", 0), and never asks for it
    made.ask(("b", 0), 0.0)
    for now, pull in enumerate(PLAN[1:]):
        made.ask(pull, float(now))
        assert made.grant_next(float(now)) == pull, "at once"
        made.end(pull, now + 0.1, complete=True)


def test_a_plan_that_comes_late_knows_what_was_left_out() -> None:
    made = Grants(lambda piece: True, 0.1)
    made.ask(("a", 1), 0.0)
    made.ask(("b", 0), 0.0)
    made.follow(PLAN)
    assert made.grant_next(0.0) == ("b", 0)


def test_a_piece_that_is_not_here_is_not_granted() -> None:
    held: set[int] = {1}
    made = grants(held)
    for pull in PLAN:
        made.ask(pull, 0.0)
    assert made.grant_next(0.0) is None
    assert made.grant_next(1.0) == ("a", 1), "what is here goes when what is not has been waited for"
    held.add(0)
    made.end(("a", 1), 1.1, complete=True)
    assert made.grant_next(1.1) == ("a", 0)


def test_a_slow_transfer_does_not_hold_the_others_back() -> None:
    made = grants()
    for pull in PLAN:
        made.ask(pull, 0.0)
    assert made.grant_next(0.0) == ("a", 0)
    assert made.grant_next(made.slow_s * 0.9) is None
    assert made.grant_next(made.slow_s * 1.1) == ("b", 0)
    without = Grants(lambda piece: True)
    for pull in PLAN:
        without.ask(pull, 0.0)
    assert without.grant_next(0.0) is not None
    assert without.grant_next(UNKNOWN_SLOW_S * 0.9) is None, "nobody said how long a transfer takes"
    assert without.grant_next(UNKNOWN_SLOW_S * 1.1) is not None


def test_measured_transfers_replace_the_plans_guess() -> None:
    made = grants(piece_s=100.0)
    now = 0.0
    for pull in PLAN[:2]:
        made.ask(pull, now)
        assert made.grant_next(now) == pull
        now += 0.01
        made.end(pull, now, complete=True)
    assert made.slow_s <= 0.1
    assert made.patience_s < 0.1


def test_a_withdrawn_pull_frees_the_link() -> None:
    made = grants()
    made.ask(("a", 0), 0.0)
    made.ask(("b", 0), 0.0)
    assert made.grant_next(0.0) == ("a", 0)
    made.end(("a", 0), 0.1, complete=False)
    assert made.grant_next(0.1 + made.patience_s * 2) == ("b", 0)


def test_unplanned_pulls_get_their_turn() -> None:
    plan = [("a", i) for i in range(40)]
    made = Grants(lambda piece: True, 0.1, plan)
    for pull in plan:
        made.ask(pull, 0.0)
    for i in range(5):
        made.ask(("joiner", i), 0.0)
    order = []
    now = 0.0
    for _ in range(20):
        pull = made.grant_next(now)
        assert pull is not None
        order.append(pull[0])
        now += 0.1
        made.end(pull, now, complete=True)
    assert order.count("joiner") == 5
    gaps = [i for i, who in enumerate(order) if who == "joiner"]
    assert all(b - a <= EXTRA_EVERY for a, b in pairwise(gaps))


def test_without_a_plan_first_come_first_served() -> None:
    made = Grants(lambda piece: True)
    made.ask(("x", 3), 1.0)
    made.ask(("y", 0), 0.5)
    assert made.grant_next(2.0) == ("y", 0)


@settings(deadline=None)
@given(st.data())
def test_everything_asked_for_is_granted_in_the_end(data: st.DataObject) -> None:
    """Whatever arrives when, dies or is withdrawn: no pull of a piece that is here waits for ever."""
    held = set(data.draw(st.sets(st.integers(0, 3))))
    plan = data.draw(st.permutations([(who, piece) for who in "abc" for piece in range(4)]))
    made = Grants(lambda piece: piece in held, 0.1, plan[: data.draw(st.integers(0, 12))])
    now, active, pending = 0.0, [], set(plan)
    for _ in range(data.draw(st.integers(0, 30))):
        now += data.draw(st.floats(0.0, 0.3))
        match data.draw(st.sampled_from(["ask", "end", "drop", "arrive", "next"])):
            case "ask" if pending:
                made.ask(pending.pop(), now)
            case "end" if active:
                made.end(active.pop(), now, complete=True)
            case "drop" if active:
                pull = active.pop()
                made.end(pull, now, complete=False)
                pending.add(pull)
            case "arrive":
                held.add(data.draw(st.integers(0, 3)))
            case "next":
                granted = made.grant_next(now)
                if granted is not None:
                    assert granted[1] in held
                    active.append(granted)
            case _:
                pass
    held.update(range(4))
    for pull in pending:
        made.ask(pull, now)
    for _ in range(200):
        granted = made.grant_next(now)
        if granted is not None:
            active.append(granted)
        elif not active:
            quiet_s = made.quiet_s(now)
            if quiet_s == float("inf"):
                break
            now += quiet_s + 1e-6  # no longer: who sleeps so long misses nothing
        while active:
            made.end(active.pop(), now, complete=True)
    assert made.waiting == 0


def test_how_long_nothing_changes_by_itself() -> None:
    made = grants({0})
    assert made.quiet_s(0.0) == float("inf"), "nothing was asked for"
    made.ask(("b", 1), 0.0)
    assert made.quiet_s(0.0) == float("inf"), "it is not here"
    made.ask(("b", 0), 1.0)
    assert made.grant_next(1.0) is None
    assert abs(made.quiet_s(1.0) - made.patience_s) < 1e-9, "a comes first, but not for ever"
    made.ask(("a", 0), 1.0)
    assert made.grant_next(1.0) == ("a", 0)
    assert abs(made.quiet_s(1.0) - made.slow_s) < 1e-9


def test_a_receiver_that_was_slow_once_runs_beside_the_others() -> None:
    made = grants()
    for pull in PLAN:
        made.ask(pull, 0.0)
    assert made.grant_next(0.0) == ("a", 0)
    assert made.grant_next(2 * UNKNOWN_SLOW_S) == ("b", 0)
    made.end(("a", 0), 2.1, complete=True)
    assert made.grant_next(2.1) == ("a", 1), "beside b's transfer, although that is under way"
    made.end(("b", 0), 2.2, complete=True)
    assert made.grant_next(2.2) == ("b", 1), "beside a's"
