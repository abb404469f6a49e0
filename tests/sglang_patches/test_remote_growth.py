"""Which pieces an engine takes over of its peers, and the route that follows."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from prism.remote.link import PeerLink
from sglang_patches.remote_growth import PieceRun, ends_held, grown
from sglang_patches.remote_lead import Stop

A, B = cast(PeerLink, "a"), cast(PeerLink, "b")
COUNT = 8
OVER_A = (Stop(None, 0, 2), Stop(A, 2, 7), Stop(None, 7, COUNT))


def test_both_ends_of_what_a_peer_runs_are_taken_over_and_not_what_is_between() -> None:
    low, high = PieceRun(OVER_A[1], 2, 3), PieceRun(OVER_A[1], 6, 7)
    assert ends_held(OVER_A, {0, 1, 2, 4, 6, 7}) == [low, high]
    assert grown(OVER_A, [low, high]) == (Stop(None, 0, 3), Stop(A, 3, 6), Stop(None, 6, COUNT))
    assert ends_held(OVER_A, {0, 1, 4, 7}) == []


def test_a_stop_that_is_here_is_one_run_and_its_neighbours_are_one_stop() -> None:
    (run,) = ends_held(OVER_A, set(range(COUNT)))
    assert run == PieceRun(OVER_A[1], 2, 7)
    assert run.layers(COUNT - 2) == range(1, 6)
    assert grown(OVER_A, [run]) == (Stop(None, 0, COUNT),)


def test_layers_of_a_run_with_embedding_or_head_are_layers_only() -> None:
    assert PieceRun(Stop(A, 0, 2), 0, 2).layers(COUNT - 2) == range(0, 1)
    assert PieceRun(Stop(A, 0, 1), 0, 1).layers(COUNT - 2) == range(0, 0)


@given(st.lists(st.integers(1, COUNT - 2), max_size=3).map(sorted), st.frozensets(st.integers(1, COUNT - 2)))
def test_growth_keeps_every_piece_and_makes_no_further_stops(cuts: list[int], came: frozenset[int]) -> None:
    bounds = [0, *dict.fromkeys(cuts), COUNT - 1, COUNT]
    links = (None, A, B, A)
    stops = [Stop(links[i % 4], first, end) for i, (first, end) in enumerate(pairwise(bounds))]
    route = grown((*stops[:-1], Stop(None, COUNT - 1, COUNT)), [])
    after = grown(route, ends_held(route, came))
    where = {p: stop.link for stop in route for p in range(stop.first, stop.end)}
    for stop in after:
        assert all(stop.link in (None, where[p]) for p in range(stop.first, stop.end))
        assert stop.link is not None or all(where[p] is None or p in came for p in range(stop.first, stop.end))
    assert [p for stop in after for p in range(stop.first, stop.end)] == list(range(COUNT))
    assert sum(stop.link is not None for stop in after) <= sum(stop.link is not None for stop in route)
