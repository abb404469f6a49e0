"""Which pieces an engine takes over of its peers, and the route that follows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism.remote.orders import KvWay
from sglang_patches.remote_asking import WantedKv
from sglang_patches.remote_stops import KvRate, RoutePeer, Stop
from sglang_patches.remote_taking import SLICE_S, KvTaking, PieceRun, ends_held, grown

A, B = RoutePeer(None), RoutePeer(None)
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
    peers = (None, A, B, A)
    stops = [Stop(peers[i % 4], first, end) for i, (first, end) in enumerate(pairwise(bounds))]
    route = grown((*stops[:-1], Stop(None, COUNT - 1, COUNT)), [])
    after = grown(route, ends_held(route, came))
    where = {p: stop.peer for stop in route for p in range(stop.first, stop.end)}
    for stop in after:
        assert all(stop.peer in (None, where[p]) for p in range(stop.first, stop.end))
        assert stop.peer is not None or all(where[p] is None or p in came for p in range(stop.first, stop.end))
    assert [p for stop in after for p in range(stop.first, stop.end)] == list(range(COUNT))
    assert sum(stop.peer is not None for stop in after) <= sum(stop.peer is not None for stop in route)


LAYERS, SLOTS, ROW_BYTES = COUNT - 2, 400, 2 * 3 * 4


class GrowingEngine:
    """A leader's KV and request table beside its peer's KV; one request, which a step makes longer."""

    def __init__(self, tokens: int, slots_of_a_slice: float) -> None:
        shape = (SLOTS, 1, 3)
        self.k, self.v = ([torch.zeros(shape) for _ in range(LAYERS)] for _ in range(2))
        self.there = [[torch.rand(shape) for _ in range(LAYERS)] for _ in range(2)]
        layers = 5  # of the run that is taken over
        A.rate = KvRate(0.0, slots_of_a_slice * layers * ROW_BYTES / SLICE_S)
        self.asking, self.world = self, 1
        self.prefill_tokens_s, self.here, self.step_s = 1e9, cast(Any, None), 0.0
        self.fetched: list[int] = []
        self.put_s, self._looks, self._now_s = 0.0, 0, 0.0
        """What a slot takes when it has come."""
        table = torch.arange(SLOTS)[None]
        self.req: Any = SimpleNamespace(
            rid="r", req_pool_idx=0, origin_input_ids=array("q", range(tokens)), output_ids=array("q"),
            finished=lambda: False, effective_kv_committed_len=lambda: len(self.req.origin_input_ids)
        )  # fmt: skip
        self.scheduler = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=[self.req]), last_batch=None, chunked_req=None,
            server_args=SimpleNamespace(disable_radix_cache=True),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool_allocator=SimpleNamespace(
                get_kvcache=lambda: SimpleNamespace(
                    head_num=1, head_dim=3, v_head_dim=3, store_dtype=torch.float32, k_buffer=self.k, v_buffer=self.v
                )
            ),
        )  # fmt: skip
        self.slots = table[0]

    def taking(self) -> KvTaking:
        return KvTaking(
            self.scheduler, cast(Any, self), [PieceRun(OVER_A[1], 2, 7)], LAYERS, KvWay.FETCH, cast(Any, self),
            self.clock,
        )  # fmt: skip

    def clock(self) -> float:
        """It is looked at before what has come is put where it belongs, and behind that."""
        self._looks += 1
        self._now_s += self.fetched[-1] * self.put_s if self._looks % 2 == 0 else 0.0
        return self._now_s

    def same(self, number: int) -> int:
        return number

    def fetch(self, wanted: Sequence[WantedKv], slots: list[int]) -> list[tuple[Any, Any]]:
        assert [one.peer for one in wanted] == [A]
        self.fetched.append(len(slots))
        first, end = wanted[0].layers.start, wanted[0].layers.stop
        k, v = (torch.stack([buffer[slots] for buffer in side[first:end]]) for side in self.there)
        return [(k, v)]

    def step(self, tokens: int, *old: int) -> None:
        """Slots of so many further tokens, and those of the tokens ``old`` again, are written at the peer."""
        count = len(self.req.origin_input_ids)
        self.req.origin_input_ids.extend(range(tokens))
        slots = self.slots[[*range(count, count + tokens), *old]]
        for side in self.there:
            for buffer in side:
                buffer[slots] += 1.0
        self.here[slots] = False

    def check(self) -> None:
        slots = self.slots[: len(self.req.origin_input_ids)]
        for here, there in zip((self.k, self.v), self.there, strict=True):
            assert all(torch.equal(h[slots], t[slots]) for h, t in list(zip(here, there, strict=True))[1:6])


def test_kv_comes_in_slices_between_steps_and_what_they_wrote_comes_again() -> None:
    engine = GrowingEngine(tokens=100, slots_of_a_slice=30.5)
    taking = engine.taking()
    while not taking.fetch(all_at_once=False):
        engine.step(1, 7)
    engine.check()
    assert engine.fetched == [30, 30, 30, 16], "a hundred, one more for each of three steps, and token 7 each time"
    told = taking.told
    assert (told.layers, told.tokens, told.fetched) == (5, 103, True)
    assert told.estimated_s == pytest.approx(SLICE_S, rel=0.05), "nobody waits for all of it"


def test_slices_become_larger_when_steps_write_more_than_one_brings() -> None:
    engine = GrowingEngine(tokens=60, slots_of_a_slice=10.5)
    taking, steps = engine.taking(), 0
    while not taking.fetch(all_at_once=False):
        engine.step(20)
        steps += 1
        assert steps < 20, "it would never end"
    engine.check()


def test_a_slice_takes_as_long_as_a_step_over_the_route() -> None:
    engine = GrowingEngine(tokens=100, slots_of_a_slice=10.5)
    engine.step_s = 6 * SLICE_S
    taking = engine.taking()
    while not taking.fetch(all_at_once=False):
        engine.step(1)
    engine.check()
    assert engine.fetched == [31, 62, 9], "but the first, before it is known what that takes"


def test_what_has_come_is_put_where_it_belongs_before_requests_go_on() -> None:
    """Which is a part of what they stand still for, and not of what the link was seen to take."""
    engine = GrowingEngine(tokens=100, slots_of_a_slice=20.5)
    engine.put_s = SLICE_S / 20.5  # as long again
    taking = engine.taking()
    while not taking.fetch(all_at_once=False):
        engine.step(0)
    engine.check()
    assert engine.fetched == [20, *[10] * 8]


def test_nobody_waits_in_an_engine_without_requests_so_that_all_comes_at_once() -> None:
    engine = GrowingEngine(tokens=100, slots_of_a_slice=10.5)
    assert engine.taking().fetch(all_at_once=True)
    assert engine.fetched == [100]
    engine.check()


def test_a_link_is_told_by_what_is_large_enough_to_tell() -> None:
    rate = KvRate(fixed_s=0.01, bytes_s=1e6)
    assert rate.seen(1000, 5.0) == rate
    assert rate.seen(1 << 20, 0.11).bytes_s == pytest.approx((1 << 20) / 0.1)
    assert rate.seen(1 << 20, 0.005).bytes_s > 0, "faster than it ever answered"
