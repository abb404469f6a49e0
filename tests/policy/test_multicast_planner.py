"""The planner takes the fastest candidate under its model, and the model agrees with a plain simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.multicast.chain_schedule import chain_schedule
from prism.policy.multicast.chains import LinkedDevice, plan_chains
from prism.policy.multicast.estimate import NodeLink, finish_times
from prism.policy.multicast.groups import block_orders
from prism.policy.multicast.planner import (
    ALGORITHMS,
    CHAIN,
    SLACK,
    Plan,
    PlanRequest,
    build_schedule,
    chunk_starts,
    end_blocks,
    first_blocks,
    plan,
)
from prism.policy.multicast.schedule import Schedule, violations

SLOW, FAST = NodeLink(1e6, 1e6), NodeLink(1e8, 1e8)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"r{i}" for i in range(count))


def simulate(schedule: Schedule, links: list[NodeLink], block_bytes: float, overhead_s: float) -> list[float]:
    """The estimate's oracle: transfer by transfer, in plain Python."""
    held = {(s, b): 0.0 for s in range(schedule.sources) for b in range(schedule.blocks)}
    out_free, in_free = [0.0] * schedule.nodes, [0.0] * schedule.nodes
    for i in range(schedule.transfers):
        s, d, b = int(schedule.src[i]), int(schedule.dst[i]), int(schedule.block[i])
        start = max(held[s, b], out_free[s], in_free[d])
        end = start + overhead_s + block_bytes / min(links[s].out_bytes_s, links[d].in_bytes_s)
        held[d, b] = out_free[s] = in_free[d] = end
    return in_free


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    nodes=st.integers(2, 12),
    blocks=st.integers(1, 10),
    rates=st.lists(st.sampled_from([1e6, 5e6, 1e8]), min_size=12, max_size=12),
)
def test_finish_times_equal_a_simulation(name: str, nodes: int, blocks: int, rates: list[float]) -> None:
    links = [NodeLink(rate, rate) for rate in rates[:nodes]]
    schedule = build_schedule(ALGORITHMS[name], nodes, 1, blocks)
    assert np.allclose(finish_times(schedule, links, 1e5, 0.001), simulate(schedule, links, 1e5, 0.001))


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.integers(2, 12),
    sources=st.integers(1, 3),
    blocks=st.none() | st.integers(1, 10),
    rates=st.lists(st.sampled_from([1e6, 5e6, 1e8]), min_size=24, max_size=24),
)
def test_nothing_better_is_passed_over(nodes: int, sources: int, blocks: int | None, rates: list[float]) -> None:
    """Candidates are ruled out by a bound without being timed: none of them would have been faster by more than the
    slack, nor, within it, sooner for the nodes on average."""
    senders, receivers = tuple(f"s{i}" for i in range(sources)), names(nodes)
    links = {n: NodeLink(*rates[2 * i : 2 * i + 2]) for i, n in enumerate((senders + receivers)[:12])}
    request = PlanRequest(senders, receivers, 1 << 20, links=links, blocks=blocks)
    chosen = plan(request)
    placed = [links.get(n, request.default_link) for n in chosen.nodes]
    slack = 1.0 if len(set(placed)) == 1 else SLACK

    def times(schedule: Schedule) -> tuple[float, float]:
        found = finish_times(schedule, placed, request.nbytes / schedule.blocks, request.overhead_s)
        return float(found.max()), float(found[schedule.sources :].mean())

    sent_by = chosen.schedule.sources
    chains = chains_of([min(link.out_bytes_s, link.in_bytes_s) for link in placed], sent_by)
    schedules = [
        chain_schedule(chains, len(placed), sent_by, block_orders(len(chains), count))
        if name == CHAIN
        else build_schedule(algorithm, len(placed), sent_by, count)
        for name, algorithm in ALGORITHMS.items()
        for count in ((blocks,) if blocks else (4, 8, 16, 32, 64))
    ]
    best_s = min(times(schedule)[0] for schedule in schedules)
    assert chosen.expected_s <= best_s * slack * (1 + 1e-9)
    if slack > 1.0:
        mean_s = times(chosen.schedule)[1]
        good = [found for schedule in schedules if (found := times(schedule))[0] <= best_s * slack * (1 - 1e-9)]
        assert all(mean_s <= other_s * (1 + 1e-9) for _, other_s in good)


def chains_of(rates: list[float], sources: int) -> list[list[list[int]]]:
    """Of nodes with these rates, without fast domains or switches."""
    devices = [LinkedDevice(str(i), "", "", rate) for i, rate in enumerate(rates)]
    found = plan_chains(devices[:sources], devices[sources:])
    return [[[int(d.name) for d in g.devices] for g in chain.groups] for chain in found if chain.tail is not None]


def test_equal_links_take_the_schedules_steps() -> None:
    for name, algorithm in ALGORITHMS.items():
        schedule = algorithm(8, 16)
        assert max(finish_times(schedule, [FAST] * 8, 1e6, 0.0)) == pytest.approx(schedule.steps * 0.01), name


def test_few_blocks_or_many_nodes_go_by_binomial_pipeline() -> None:
    chosen = plan(PlanRequest(("s",), names(15), 64 << 20, default_link=FAST, blocks=16))
    assert chosen.schedule.algorithm == "binomial"
    assert chosen.considered["binomial"] < chosen.considered["chain"]


def test_the_choice_is_the_best_candidate() -> None:
    for receivers in (1, 2, 5, 9):
        for blocks in (1, 4, 64):
            chosen = plan(PlanRequest(("s",), names(receivers), 64 << 20, default_link=FAST, blocks=blocks))
            assert chosen.expected_s == pytest.approx(min(chosen.considered.values()))
            assert chosen.schedule.blocks == blocks


def test_free_choice_of_blocks_weighs_overhead_against_pipelining() -> None:
    small = plan(PlanRequest(("s",), names(7), 1 << 16, default_link=FAST, overhead_s=0.01))
    large = plan(PlanRequest(("s",), names(7), 1 << 30, default_link=FAST, overhead_s=0.001))
    assert small.schedule.blocks < large.schedule.blocks


def test_a_slow_node_is_last_and_forwards_nothing_that_others_wait_for() -> None:
    chosen = plan(PlanRequest(("s",), names(7), 64 << 20, links={"r0": SLOW}, default_link=FAST, blocks=16))
    times = dict(
        zip(
            chosen.nodes,
            finish_times(chosen.schedule, [SLOW if n == "r0" else FAST for n in chosen.nodes], (64 << 20) / 16, 0.001),
            strict=True,
        )
    )
    assert chosen.nodes[-1] == "r0"
    assert not chosen.schedule.sends(chosen.nodes.index("r0"))
    alone = plan(PlanRequest(("s",), names(7)[1:], 64 << 20, default_link=FAST, blocks=16))
    assert max(t for n, t in times.items() if n != "r0") <= 1.5 * alone.expected_s, "the others do not wait for it"


def test_a_receiver_that_is_sending_something_is_last_and_forwards_little() -> None:
    request = PlanRequest(("s",), names(7), 64 << 20, default_link=FAST, blocks=16, sending=frozenset({"r0"}))
    chosen = plan(request)
    sends = {node: len(chosen.schedule.sends(i)) for i, node in enumerate(chosen.nodes) if node != "s"}
    assert chosen.nodes[-1] == "r0" and sends["r0"] == 0


def test_several_sources_are_all_used() -> None:
    chosen = plan(PlanRequest(("a", "b"), names(6), 1 << 20, default_link=FAST, blocks=8))
    assert chosen.nodes[:2] == ("a", "b")
    assert {int(s) for s in chosen.schedule.src} >= {0, 1}


def test_no_more_sources_than_receivers() -> None:
    chosen = plan(PlanRequest(("a", "b", "c"), ("r",), 1 << 20, blocks=4))
    assert chosen.schedule.sources == 1
    assert len(chosen.nodes) == 2


@pytest.mark.parametrize(("sources", "receivers"), [((), ("r",)), (("s",), ()), (("s",), ("s",)), (("s", "s"), ("r",))])
def test_nonsense_is_refused(sources: tuple[str, ...], receivers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="distinct"):
        plan(PlanRequest(sources, receivers, 1))


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    receivers=st.integers(1, 9),
    sources=st.integers(1, 3),
    blocks=st.integers(1, 16),
    parts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda p: (min(p), max(p))), max_size=3),
)
def test_what_is_needed_first_is_on_its_way_to_everybody_before_the_rest(
    name: str, receivers: int, sources: int, blocks: int, parts: list[tuple[float, float]]
) -> None:
    sources = min(sources, receivers)
    first = first_blocks(parts, blocks)
    schedule = build_schedule(ALGORITHMS[name], sources + receivers, sources, blocks, first)
    assert violations(schedule) == []
    for source in range(sources):
        sent = list(dict.fromkeys(block for _, block in schedule.sends(source)))
        assert sent[: len(first)] == first or not sent
    assert {b for b in range(blocks) for a, e in parts if a < e and a * blocks < b + 1 and b < e * blocks} <= set(first)


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 40),
    sources=st.integers(1, 8),
    blocks=st.sampled_from((16, 64)),
    begin=st.floats(0, 0.3),
    end=st.floats(0.7, 1.0),
)
def test_sub_groups_begin_with_a_layer_and_have_as_many_each(
    layers: int, sources: int, blocks: int, begin: float, end: float
) -> None:
    """With chunks of equal size one of four had six layers of twenty to bring and another four, and all waited for it:
    the last layer of a chunk is whole with the first blocks of the next one."""
    parts = [(0.0, begin), (end, 1.0)]
    first = first_blocks(parts, blocks)
    starts = chunk_starts(parts, layers, sources, blocks, first)
    if not starts:
        assert layers < sources or (end - begin) * blocks / layers < 2, "layers are too small to be told apart"
        return
    rest = [block for block in range(blocks) if block not in first]
    assert starts[0] == rest[0] and len(starts) == sources and set(starts) <= set(rest)
    begun_in = [int(blocks * (begin + (end - begin) * i / layers)) for i in range(layers)]
    begun = [0, *(begun_in.index(start) for start in starts[1:])]
    if (end - begin) * blocks / layers >= 1:
        assert max(b - a for a, b in pairwise([*begun, layers])) <= -(-layers // sources)


def test_pipelines_are_complete_sooner_where_sub_groups_begin_with_a_layer() -> None:
    """Four sources, four receivers, and a model of 20 layers in 61 leaves, of which 6 and 3 come first."""
    parts = ((0.0, 6 / 61), (58 / 61, 1.0))
    request = PlanRequest(names(4), ("c", "d", "e", "f"), 62 << 20, first=parts, least_blocks=64)
    assert complete_after(plan(request)) == 27
    assert complete_after(plan(replace(request, layers=19))) == 25


def test_pipelines_are_complete_sooner_where_embedding_and_head_come_to_the_first_sub_group_alone() -> None:
    """The model above, whose first layer is in three of the leaves that come first."""
    first = ((0.0, 3 / 61), (3 / 61, 6 / 61), (58 / 61, 1.0))
    all_alike = PlanRequest(names(4), ("c", "d", "e", "f"), 62 << 20, first=first, layers=19, least_blocks=64)
    request = replace(all_alike, ends=(first[0], (59 / 61, 1.0)))
    assert complete_after(plan(all_alike)) == 25 and complete_after(plan(request)) == 21
    chosen, ends = plan(request), end_blocks(request, 64)
    assert not plan(all_alike).late and chosen.late == {chosen.nodes[i] for (i,) in chosen.groups[1:]}
    for (node,) in chosen.groups:
        blocks = [block for _, block in chosen.schedule.receives(node)]
        assert sorted(blocks) == list(range(64))
        begins = set(blocks[: len(first_blocks(first, 64))])
        assert (begins >= set(ends)) == (chosen.nodes[node] not in chosen.late)
    pair = plan(replace(request, shift=False))
    assert not pair.late and [b for _, b in pair.schedule.receives(7)][: len(begins)] == first_blocks(first, 64)


@given(st.integers(1, 6), st.integers(1, 40), st.data())
def test_orders_of_sub_groups_have_every_block_once(groups: int, blocks: int, data: st.DataObject) -> None:
    first = sorted(data.draw(st.sets(st.integers(0, blocks - 1), max_size=blocks - 1)))
    ends = data.draw(st.sets(st.sampled_from(first))) if first else set()
    orders = block_orders(groups, blocks, first=first, ends=ends)
    assert all(sorted(order) == list(range(blocks)) for order in orders)
    assert orders[0][: len(first)] == first
    for order in orders[1:]:
        assert order[: len(first) - len(ends)] == [block for block in first if block not in ends]


def complete_after(chosen: Plan) -> int:
    """Leaves that each receiver has when they have all layers between them."""
    leaves = [range(61 * i // 64, 61 * (i + 1) // 64) for i in range(64)]
    orders = [[leaf for _, block in chosen.schedule.receives(node) for leaf in leaves[block]] for node in range(4, 8)]
    bounds = [5.32 + 53.51 * i / 19 for i in range(20)]
    layers = [set(range(int(a), math.ceil(b))) for a, b in pairwise(bounds)]
    return next(n for n in range(62) if all(any(layer <= set(order[:n]) for order in orders) for layer in layers))


def test_where_it_lies_decides_which_blocks_come_first() -> None:
    assert first_blocks([(0.0, 0.25), (0.9, 1.0)], 8) == [0, 1, 7]
    assert first_blocks([], 8) == []
    request = PlanRequest(("a", "b"), ("c", "d"), 1 << 20, first=((0.9, 1.0),), least_blocks=16)
    chosen = plan(request).schedule
    assert chosen.blocks >= 16 and [chosen.receives(node)[0][1] for node in (2, 3)] == [chosen.blocks - 2] * 2
