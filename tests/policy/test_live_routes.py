"""Routes over engines that have what a loading one lacks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.live.routes import FALLBACKS, Hop, LayerHelper, loads_downwards, plan_routes

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


@pytest.mark.parametrize("count", [2, 3, 8])
def test_instances_that_load_together_have_all_layers_when_each_has_half(count: int) -> None:
    directions: list[bool] = []
    for _ in range(count):
        directions.append(loads_downwards(directions))
    assert abs(2 * sum(directions) - count) <= 1
