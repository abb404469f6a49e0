"""Routes over engines that have what a loading one lacks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.live.routes import (
    FALLBACKS,
    Company,
    Hop,
    LayerHelper,
    layer_order,
    leaves_for_pipeline,
    next_turn,
    plan_routes,
    worth_switching,
)

COUNT = 8
HEAD = COUNT - 1
ALL = frozenset(range(COUNT))
NEW = frozenset({0, 1, HEAD})


def helper(name: str, held: frozenset[int] = ALL, led_pieces: int = 0, requests: int = 0) -> LayerHelper:
    return LayerHelper(name, held, led_pieces, requests)


def over(name: str) -> tuple[Hop, ...]:
    return Hop("", 0, 2), Hop(name, 2, HEAD), Hop("", HEAD, COUNT)


def test_one_that_has_all_is_asked_for_all_and_the_others_when_it_is_lost() -> None:
    found = plan_routes(COUNT, NEW, [helper("busy", requests=9), helper("idle"), helper("leads", led_pieces=5)])
    assert found == (over("idle"), over("busy"), over("leads"))
    assert len(plan_routes(COUNT, NEW, [helper(str(i)) for i in range(9)])) == 1 + FALLBACKS


def test_those_that_begin_at_the_same_moment_are_dealt_to_other_machines() -> None:
    """Each sees that nobody is led yet; on one machine that is known exactly."""
    far = [LayerHelper(name, ALL, 0, 0, far=True) for name in ("a", "b")]
    first = [plan_routes(COUNT, NEW, far, turn=turn)[0] for turn in range(4)]
    assert first == [over("a"), over("b"), over("a"), over("b")]
    assert {plan_routes(COUNT, NEW, [*far, helper("here", requests=-1)], turn=i)[0] for i in range(4)} == {over("here")}


def test_what_has_come_meanwhile_runs_at_the_leader() -> None:
    (found,) = plan_routes(COUNT, NEW | {3, 6}, [helper("a")])
    assert found == (Hop("", 0, 2), Hop("a", 2, 3), Hop("", 3, 4), Hop("a", 4, 6), Hop("", 6, COUNT))
    assert plan_routes(COUNT, ALL, []) == ((Hop("", 0, COUNT),),)


def test_several_that_have_it_together() -> None:
    parts = [helper("low", frozenset({0, 1, 2, 3, HEAD})), helper("high", frozenset({1, 3, 4, 5, 6}))]
    (found,) = plan_routes(COUNT, NEW, parts)
    assert found == (Hop("", 0, 2), Hop("low", 2, 4), Hop("high", 4, HEAD), Hop("", HEAD, COUNT))
    assert plan_routes(COUNT, NEW, parts[:1]) == () == plan_routes(COUNT, NEW, [])
    assert plan_routes(COUNT, NEW, [*parts, helper("all", requests=100)]) == (over("all"),)


def test_one_without_the_head_leads_nobody() -> None:
    with pytest.raises(ValueError, match="head"):
        plan_routes(COUNT, {0, 1}, [helper("a")])


@given(
    st.frozensets(st.integers(0, HEAD)), st.lists(st.frozensets(st.integers(0, HEAD)), max_size=4), st.integers(0, 9)
)
def test_a_route_has_every_piece_once_where_it_is(held: frozenset[int], parts: list[frozenset[int]], led: int) -> None:
    helpers = [helper(str(i), part, led_pieces=led * i) for i, part in enumerate(parts)]
    where = {h.name: h.held for h in helpers} | {"": held | {HEAD}}
    found = plan_routes(COUNT, where[""], helpers)
    assert bool(found) == (where[""].union(*parts) >= ALL)
    for route in found:
        assert [p for hop in route for p in range(hop.first, hop.end)] == sorted(ALL)
        assert all(set(range(hop.first, hop.end)) <= where[hop.name] for hop in route)
        assert all(a.name != b.name for a, b in pairwise(route))


def companion(name: str, held: frozenset[int], company: Company = Company.PIPELINE) -> LayerHelper:
    return LayerHelper(name, held, 0, 0, True, company)


LOW, HIGH = frozenset({0, 1, 2, 3, HEAD}), frozenset({0, 1, 4, 5, 6, HEAD})


def test_a_pipeline_comes_before_one_that_has_everything_which_is_there_when_it_breaks() -> None:
    everybody = [helper("all"), companion("high", HIGH), companion("low", LOW)]
    assert plan_routes(COUNT, LOW, everybody, pipelined=True) == (
        (Hop("", 0, 4), Hop("high", 4, HEAD), Hop("", HEAD, COUNT)),
        (Hop("", 0, 4), Hop("all", 4, HEAD), Hop("", HEAD, COUNT)),
    )
    assert plan_routes(COUNT, LOW, everybody)[0][1] == Hop("all", 4, HEAD), "it was ordered as a pair"
    assert plan_routes(COUNT, NEW, everybody[:2], pipelined=True) == (over("all"),), "its pipeline lacks layers 2 and 3"


def test_others_of_the_decision_fill_what_the_own_pipeline_lacks() -> None:
    mine, other = companion("mine", LOW), companion("other", HIGH, Company.DECISION)
    (found,) = plan_routes(COUNT, NEW, [other, mine], pipelined=True)
    assert found == (Hop("", 0, 2), Hop("mine", 2, 4), Hop("other", 4, HEAD), Hop("", HEAD, COUNT))


@given(
    st.frozensets(st.integers(0, HEAD)),
    st.lists(st.tuples(st.frozensets(st.integers(0, HEAD)), st.sampled_from(Company)), max_size=5),
)
def test_whoever_is_asked_first_a_route_is_found_when_there_is_one(
    held: frozenset[int], parts: list[tuple[frozenset[int], Company]]
) -> None:
    helpers = [companion(str(i), part, company) for i, (part, company) in enumerate(parts)]
    where = {h.name: h.held for h in helpers} | {"": held | {HEAD}}
    found = plan_routes(COUNT, where[""], helpers, pipelined=True)
    assert bool(found) == (where[""].union(*(part for part, _ in parts)) >= ALL)
    for route in found:
        assert [p for hop in route for p in range(hop.first, hop.end)] == sorted(ALL)
        assert all(set(range(hop.first, hop.end)) <= where[hop.name] for hop in route)
    mine = where[""].union(*(part for part, company in parts if company is Company.PIPELINE))
    if mine >= ALL:
        assert all(h.company is Company.PIPELINE for h in helpers for hop in found[0] if hop.name == h.name)


def test_a_leader_changes_over_to_its_pipeline_when_that_has_what_it_lacks_and_it_lacks_much() -> None:
    high = companion("high", HIGH)
    assert leaves_for_pipeline(COUNT, LOW, [helper("all"), high], {"all"})
    assert not leaves_for_pipeline(COUNT, LOW, [helper("all"), high], {"high"}), "it is in it"
    assert not leaves_for_pipeline(COUNT, NEW, [helper("all"), high], {"all"}), "nobody of it has layer 2"
    assert not leaves_for_pipeline(COUNT, ALL - {4}, [helper("all"), high], {"all"}), "it needs nobody soon"
    assert not worth_switching(COUNT, ALL)


@given(st.integers(1, 40), st.integers(1, 9))
def test_instances_that_load_together_have_all_layers_when_each_has_its_part(layers: int, turns: int) -> None:
    orders = [layer_order(layers, turn, turns) for turn in range(turns)]
    assert all(sorted(order) == list(range(layers + 2)) for order in orders)
    assert all(set(order[:3]) == {0, 1, layers + 1} for order in orders)
    part = 3 + -(-(layers - 1) // turns)
    assert {piece for order in orders for piece in order[:part]} == set(range(layers + 2))


def test_turns_are_dealt_evenly_and_have_bounds() -> None:
    taken: list[int] = []
    for _ in range(7):
        taken.append(next_turn(taken, 3))
    assert taken == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="turn 2 of 2"):
        layer_order(4, 2, 2)
