"""Slow nodes are routed around: how long, whom and what, on a modelled clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.multicast.planner import ALGORITHMS, Plan, build_schedule
from prism.transfer.grants import ASIDE_EVERY, Grants
from prism.transfer.patience import BACK_OFF_S, MIN_SLIP_S, UNKNOWN_S, Patience
from prism.transfer.piece_choice import Offer, choose_piece
from tests.transfer.modelled import PIECE_BYTES, PIECE_S, TICK_S, Model

NEVER_S = 500.0
BOUND_FACTOR, BOUND_STEPS = 3.0, 20
"""The bound of docs/weights.md: so many times the undisturbed time, and so many steps."""


def plan_of(nodes: int, blocks: int, algorithm: str = "binomial") -> Plan:
    schedule = build_schedule(ALGORITHMS[algorithm], nodes, 1, blocks)
    return Plan(tuple(f"n{i}" for i in range(nodes)), schedule, schedule.steps * PIECE_S, {})


def finished_s(model: Model, but: dict[str, float]) -> float:
    model.run(NEVER_S)
    times = {name: node.finished_s for name, node in model.nodes.items()}
    assert None not in times.values(), times
    return max(time for name, time in times.items() if name not in but and time is not None)


@pytest.mark.parametrize("algorithm", ["binomial", "chain"])
@pytest.mark.parametrize(("nodes", "blocks"), [(2, 8), (5, 16), (8, 16), (16, 8)])
def test_undisturbed_nobody_leaves_the_plan(nodes: int, blocks: int, algorithm: str) -> None:
    plan = plan_of(nodes, blocks, algorithm)
    model = Model(plan)
    took_s = finished_s(model, {})
    assert not [name for name, node in model.nodes.items() if node.slipped and node.plan.receives]
    assert took_s <= plan.schedule.steps * (PIECE_S + TICK_S)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.data())
def test_the_others_are_done_within_the_bound(data: st.DataObject) -> None:
    nodes, blocks = data.draw(st.integers(3, 9)), data.draw(st.integers(1, 12))
    plan = plan_of(nodes, blocks, data.draw(st.sampled_from(["binomial", "chain"])))
    victims = data.draw(st.sets(st.integers(1, nodes - 1), min_size=1, max_size=max(1, nodes // 4)))
    slow = {f"n{victim}": data.draw(st.floats(2.0, 50.0)) for victim in sorted(victims)}
    undisturbed_s = finished_s(Model(plan), {})
    model = Model(plan, slow)
    assert finished_s(model, slow) <= BOUND_FACTOR * undisturbed_s + BOUND_STEPS * PIECE_S
    sent = {name: node.sent for name, node in model.nodes.items()}
    assert sum(sent.values()) == pytest.approx((nodes - 1) * blocks), "no byte goes twice to anybody"
    assert max(sent.values()) <= 4 * blocks + nodes, "the source sends everything itself"


@pytest.mark.parametrize("victim", ["n1", "n2", "n3", "n7"])
@pytest.mark.parametrize("factor", [3.0, 10.0])
def test_eight_nodes(victim: str, factor: float) -> None:
    plan = plan_of(8, 16)
    slow = {victim: factor}
    assert finished_s(Model(plan, slow), slow) <= 2.5 * finished_s(Model(plan), {})


def test_a_network_slower_than_planned_sends_nothing_twice() -> None:
    model = Model(plan_of(8, 16), true_s=5 * PIECE_S)
    finished_s(model, {})
    assert sum(node.sent for node in model.nodes.values()) == pytest.approx(7 * 16)


@pytest.mark.parametrize("algorithm", ["binomial", "chain"])
@pytest.mark.parametrize("sources", [1, 2])
def test_a_guess_makes_nobody_leave_the_plan(algorithm: str, sources: int) -> None:
    """Of links of which nothing is known: they turn out to be two hundred times slower than the ten gigabits that were
    planned with."""
    true_s = 4 * PIECE_S
    schedule = build_schedule(ALGORITHMS[algorithm], 8, sources, 16)
    plan = Plan(tuple(f"n{i}" for i in range(8)), schedule, schedule.steps * PIECE_S / 50, {})
    model = Model(plan, true_s=true_s, guessed=True)
    took_s = finished_s(model, {})
    assert not [name for name, node in model.nodes.items() if node.slipped and node.plan.receives]
    assert took_s <= schedule.steps * (true_s + TICK_S)


# --- patience ---


def patience(piece_s: float = PIECE_S) -> Patience:
    made = Patience({0: 0, 1: 1, 2: 2}, piece_s, PIECE_BYTES)
    made.begin_pulling(100.0)
    return made


def test_the_plan_slips_when_a_piece_is_late() -> None:
    made = patience(piece_s=1.0)
    assert 102.0 < made.slips_at_s(0) < made.slips_at_s(1)
    made.on_piece(0, "a", PIECE_BYTES, 1.0, 105.0)  # the others began later than this node: that is no lateness
    assert made.slips_at_s(1) > 106.0 + MIN_SLIP_S
    assert made.slips_at_s(None) == made.slips_at_s(7) == float("inf"), "not by the plan"
    assert patience(0.0).slips_at_s(1) == 100.0 + 2 * UNKNOWN_S, "one for each step"


def test_pieces_that_all_come_a_little_late_are_no_reason_to_leave_the_plan() -> None:
    """A third more than a transfer takes each, as on machines that have something else to do, too. Twice as much is."""
    for takes, slips in ((1.3, False), (1.7, False), (2.0, True), (3.0, True)):
        made = Patience({piece: piece for piece in range(64)}, 1.0, PIECE_BYTES)
        made.begin_pulling(0.0)
        late = []
        for piece in range(64):
            came_s = (piece + 1) * takes
            late.append(came_s > made.slips_at_s(piece))
            made.on_piece(piece, "a", PIECE_BYTES, 1.0, came_s)
        assert any(late) == slips, takes
        assert not slips or late.index(True) <= 16


def test_slow_is_what_others_are_not() -> None:
    made = patience()
    by_plan_s = made.half_s("a", PIECE_BYTES)
    for node in ("b", "c", "d"):
        made.on_piece(0, node, PIECE_BYTES, 10 * PIECE_S, 101.0)
    assert made.half_s("a", PIECE_BYTES) > 3 * by_plan_s, "all are slow: it is the network"
    made.on_piece(1, "c", PIECE_BYTES, PIECE_S, 102.0)
    assert made.half_s("a", PIECE_BYTES) <= by_plan_s
    assert patience(0.0).half_s("a", PIECE_BYTES) == UNKNOWN_S
    assert patience(0.0).half_s("a", 250 << 20) == pytest.approx(10.5, rel=0.01), (
        "what a slow link may take for so much"
    )


def test_links_inside_a_domain_are_no_measure_of_the_others() -> None:
    """Four machines of a domain gather from each other at fifty times the network's rate."""
    made = Patience({0: 0, 1: 1, 2: 2}, PIECE_S, PIECE_BYTES, peers=5, near=["x", "y", "z"])
    made.begin_pulling(100.0)
    before = made.half_s("a", PIECE_BYTES), made.slips_at_s(2)
    for node in ("x", "y", "z"):
        made.on_piece(0, node, PIECE_BYTES, PIECE_S / 50, 100.0)
    assert made.half_s("a", PIECE_BYTES) == before[0] and made.typical_s == PIECE_S
    assert made.slips_at_s(2) <= before[1], "when the others began is known"
    made.blame("x", 101.0)
    assert not made.trusts("x", 101.1), "one that fails is left alone as ever"


def test_trust_comes_back_later_each_time() -> None:
    made = patience()
    assert made.trusts("a", 100.0)
    made.blame("a", 100.0, PIECE_BYTES, 1.0)
    assert not made.trusts("a", 100.0)
    again_s = 100.0 + BACK_OFF_S + 1e-6
    assert made.trusts("a", again_s)
    made.blame("a", again_s, PIECE_BYTES, 1.0)
    assert not made.trusts("a", again_s + BACK_OFF_S)
    assert made.trusts("a", again_s + 2 * BACK_OFF_S + 1e-6)
    made.blame("b", again_s)
    assert not made.trusts("b", again_s + BACK_OFF_S), "the dead are asked still less often"


def test_who_is_as_fast_as_the_others_is_forgiven() -> None:
    made = patience()
    made.blame("a", 100.0, PIECE_BYTES, 1.0)
    for node in ("b", "c"):
        made.on_piece(0, node, PIECE_BYTES, 1.0, 100.0)
        made.forgive_if_equal("a")
    assert not made.trusts("a", 100.0), "the plan promised more than any of them"
    made.on_piece(0, "d", PIECE_BYTES, 1.0, 100.0)
    made.forgive_if_equal("a")
    assert made.trusts("a", 100.0)


# --- choice ---


def offer(node: str, *pieces: int, waiting: int = 0, source: bool = False) -> Offer:
    return Offer(node, frozenset(pieces), waiting, source)


def test_the_source_is_spared_and_slow_nodes_come_last() -> None:
    source, peer, slow = offer("s", 1, 2, 3, source=True), offer("p", 1), offer("z", 1, 2)
    assert choose_piece([1], [source, peer, slow], 0, {"z"}) == ("p", 1)
    assert choose_piece([2], [source, slow], 0, {"z"}) == ("s", 2)
    assert choose_piece([2], [slow], 0, {"z"}) == ("z", 2)
    assert choose_piece([9], [source, peer], 0) is None
    assert choose_piece([1], [offer("p", 1, waiting=9), source], 0) == ("s", 1), "busier than the source is worth"


def test_several_sources_are_asked_for_what_nobody_else_has() -> None:
    """Else receivers would take from each other what one of them has, and have all pieces between them late."""
    sources = [offer("s", 0, 1, source=True), offer("t", 0, 1, source=True)]
    assert choose_piece([0, 1], [*sources, offer("a", 0)], 0) == ("s", 1)
    assert choose_piece([1], [*sources, offer("a", 1)], 0) == ("a", 1), "their links are spared"


def test_rare_pieces_first_but_not_for_the_slow_and_each_node_begins_elsewhere() -> None:
    source, peer = offer("s", 1, 2, 3, source=True), offer("p", 3)
    assert choose_piece([3, 2], [source, peer], 0) == ("s", 2)
    assert choose_piece([3, 2], [source, peer], 0, {"me"}, slow_myself=True) == ("p", 3)
    assert {choose_piece([1, 2, 3], [source], turn) for turn in range(3)} == {("s", 1), ("s", 2), ("s", 3)}
    assert choose_piece([1, 2], [source], 0, planned={2: "s"}) == ("s", 2)


# --- grants ---


def test_a_slow_receiver_takes_a_quarter_of_the_link_at_most() -> None:
    made = Grants(lambda piece: True, 1.0, [("slow", 0), ("a", 0)])
    pulls = [("slow", i) for i in range(60)] + [("a", i) for i in range(60)]
    for pull in pulls:
        made.ask(pull, 0.0)
    active: dict[tuple[str, int], float] = {}
    granted: list[tuple[str, int]] = []
    now_s = 0.0
    while len(granted) < 50:
        while (pull := made.grant_next(now_s)) is not None:
            granted.append(pull)
            active[pull] = now_s + (2.5 if pull[0] == "slow" else 1.0)
        now_s += 0.125
        for pull, end_s in list(active.items()):
            if now_s >= end_s:
                made.end(pull, now_s, complete=True)
                del active[pull]
    assert made.slow == {"slow"}
    beside = [pull for pull in granted[10:] if pull[0] == "slow"]
    assert 0 < len(beside) <= len(granted[10:]) / ASIDE_EVERY


def test_a_receiver_that_left_the_plan_is_not_waited_for() -> None:
    made = Grants(lambda piece: True, 1.0, [("a", 0), ("b", 0)])
    made.ask(("a", 5), 0.0, scheduled=False)
    made.ask(("b", 0), 0.0)
    assert made.grant_next(0.0) == ("b", 0)
    made.end(("b", 0), 1.0, complete=True)
    assert made.grant_next(1.0) == ("a", 5)
