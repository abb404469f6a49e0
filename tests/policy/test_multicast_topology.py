"""Chains as schedules, and the planner's choice where fast domains, leaf switches and busy sources are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.multicast.chain_schedule import chain_schedule
from prism.policy.multicast.estimate import NodeLink, finish_times
from prism.policy.multicast.groups import block_orders
from prism.policy.multicast.links import split_by_topology
from prism.policy.multicast.planner import ALGORITHMS, CHAIN, Plan, PlanRequest, plan
from prism.policy.multicast.schedule import Schedule, violations
from prism.policy.multicast.topology import NetworkTopology

RATE = 1e8
LINK = NodeLink(RATE, RATE)
NBYTES, BLOCKS = 16 << 20, 16


def numbered(sizes: Sequence[Sequence[int]]) -> tuple[list[list[list[int]]], int, int]:
    """Chains of groups of these sizes (a source group first), the number of nodes, and of sources among them."""
    sources = sum(chain[0] for chain in sizes)
    head, rest = iter(range(sources)), iter(range(sources, sum(map(sum, sizes))))
    chains = [[[next(head if i == 0 else rest) for _ in range(n)] for i, n in enumerate(chain)] for chain in sizes]
    return chains, sum(map(sum, sizes)), sources


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 4), min_size=2, max_size=5), min_size=1, max_size=3),
    blocks=st.integers(1, 20),
)
def test_chains_of_groups_are_sound_schedules(sizes: list[list[int]], blocks: int) -> None:
    """Every block once to everybody, one at a time over each device's own link, whatever goes round in a group."""
    chains, nodes, sources = numbered(sizes)
    schedule = chain_schedule(chains, nodes, sources, block_orders(len(chains), blocks))
    group_of = {node: (c, g) for c, chain in enumerate(chains) for g, group in enumerate(chain) for node in group}
    assert violations(schedule, near=lambda a, b: group_of[a] == group_of[b]) == []
    for chain in chains:
        for sender, receiver in pairwise(chain):
            crossed = [n for n in receiver for src, _ in schedule.receives(n) if src in sender]
            shards = min(len(sender), len(receiver))
            assert len(crossed) == blocks, "no block crosses a link between groups twice"
            assert len(set(crossed)) == min(shards, blocks)
        assert all(not schedule.sends(n) or len(chain[-1]) > 1 for n in chain[-1]), (
            "the tail sends nobody else anything"
        )


def test_a_link_of_two_shards_takes_half_the_steps() -> None:
    chains, nodes, sources = numbered([[2, 2, 1]])
    schedule = chain_schedule(chains, nodes, sources, [range(BLOCKS)])
    crossing = (schedule.src < 2) & (schedule.dst >= 2)
    assert int(schedule.step[crossing].max()) + 1 == BLOCKS // 2
    assert schedule.steps == BLOCKS + 1, "one device takes a block a step: the first comes a step later, by one hop"


def domains(*groups: str) -> NetworkTopology:
    return NetworkTopology(
        domains={node: group for group in groups for node in group}, domain_bytes_s=dict.fromkeys(groups, 1e12)
    )


def two_leaves(uplink_bytes_s: float) -> NetworkTopology:
    """a, b, c under one switch, d, e, f under another."""
    leaves = {node: leaf for leaf in ("abc", "def") for node in leaf}
    return NetworkTopology(leaves=leaves, uplink_bytes_s=dict.fromkeys(("abc", "def"), uplink_bytes_s))


def planned(sources: str, receivers: str, topology: NetworkTopology, **more: object) -> Plan:
    request = PlanRequest(
        tuple(sources),
        tuple(receivers),
        NBYTES,
        default_link=LINK,
        overhead_s=0.0,
        topology=topology,
        **more,  # type: ignore[arg-type]
    )
    return plan(request)


def test_links_between_machines_of_several_devices_are_sharded() -> None:
    chosen = planned("ab", "cde", domains("ab", "cd"), blocks=BLOCKS)
    assert chosen.chains == ((("a", "b"), ("c", "d"), ("e",)),) and chosen.words() == "a+b > c+d > e"
    assert chosen.expected_s == pytest.approx((BLOCKS + 1) * NBYTES / BLOCKS / RATE, rel=0.01)
    wiring = domains("ab", "cd").wiring(chosen.nodes)
    times = finish_times(chosen.schedule, [LINK] * 5, NBYTES / BLOCKS, 0.0, wiring)
    done_s = {node: float(at_s) for node, at_s in zip(chosen.nodes, times, strict=True)}
    assert max(done_s["c"], done_s["d"]) < 0.51 * done_s["e"], "which all of them would reach no sooner otherwise"
    two = planned("ab", "cd", domains("ab", "cd"), blocks=BLOCKS)
    assert two.expected_s == pytest.approx(NBYTES / 2 / RATE, rel=0.01), "both links carry half of it"


def test_a_narrow_uplink_is_crossed_once() -> None:
    chosen = planned("a", "bcdef", two_leaves(RATE), blocks=BLOCKS)
    assert len(chosen.chains) == 1 and chosen.chains[0][:1] == (("a",),)
    order = [node for group in chosen.chains[0] for node in group]
    assert set(order[:3]) == set("abc")
    other = planned("a", "bcdef", NetworkTopology(), blocks=BLOCKS)
    assert other.schedule.algorithm == "binomial", "which is as good where nothing is narrow"


def test_each_leaf_is_served_by_its_own_source() -> None:
    chosen = planned("ad", "bcef", two_leaves(RATE / 4), blocks=BLOCKS)
    pairs = {(chosen.nodes[s], chosen.nodes[d]) for s, d in zip(chosen.schedule.src, chosen.schedule.dst, strict=True)}
    assert all((s in "abc") == (d in "abc") for s, d in pairs)
    near = planned("ad", "e", two_leaves(RATE / 4))
    assert near.nodes == ("d", "e"), "of two sources the one under the receiver's switch"


def test_a_source_that_is_sending_is_left_out_while_there_is_another() -> None:
    chosen = planned("ab", "cd", NetworkTopology(), sending=frozenset("a"))
    assert chosen.nodes[: chosen.schedule.sources] == ("b",) and chosen.left_out == ("a",)
    forced = planned("ab", "cd", NetworkTopology(), sending=frozenset("ab"))
    assert set(forced.nodes[: forced.schedule.sources]) == set("ab") and forced.left_out == ()


def test_a_slow_link_is_the_last_of_its_chain() -> None:
    slow = {"c": NodeLink(RATE / 20, RATE / 20)}
    chosen = planned("a", "bcde", domains("de"), links=slow, blocks=BLOCKS)
    assert not chosen.schedule.sends(chosen.nodes.index("c"))
    others = finish_times(
        chosen.schedule,
        [slow.get(n, LINK) for n in chosen.nodes],
        NBYTES / BLOCKS,
        0.0,
        domains("de").wiring(chosen.nodes),
    )
    assert max(others[chosen.nodes.index(n)] for n in "bde") < 1.5 * NBYTES / RATE


def brute_force(rates: Sequence[float], sources: int) -> tuple[float, float]:
    """The least time of the last node, and the least mean of those within it, of all ways to deal nodes to chains."""
    links = [NodeLink(rate, rate) for rate in rates]
    found = []
    receivers = range(sources, len(rates))
    for order in permutations(receivers):
        for dealt in product(range(sources), repeat=len(order)):
            chains = [[[s], *([n] for n, to in zip(order, dealt, strict=True) if to == s)] for s in range(sources)]
            some = [chain for chain in chains if len(chain) > 1]
            schedule = chain_schedule(some, len(rates), sources, [range(4)] * len(some))
            found.append(times_of(schedule, links, sources))
    best_s = min(last for last, _ in found)
    return best_s, min(mean for last, mean in found if last <= best_s * (1 + 1e-9))


def times_of(schedule: Schedule, links: Sequence[NodeLink], sources: int) -> tuple[float, float]:
    times = finish_times(schedule, links, 1e6, 0.0)
    return float(times.max()), float(np.mean(times[sources:]))


@settings(max_examples=40, deadline=None)
@given(rates=st.lists(st.sampled_from([1e6, 2e6, 8e6]), min_size=2, max_size=5))
def test_no_order_of_one_chain_is_better_than_by_speed(rates: list[float]) -> None:
    """From one source: neither for the last node nor, of those as good, on average."""
    ordered = [rates[0], *sorted(rates[1:], reverse=True)]
    schedule = chain_schedule([[[n] for n in range(len(rates))]], len(rates), 1, [range(4)])
    last, mean = times_of(schedule, [NodeLink(rate, rate) for rate in ordered], 1)
    best_last, best_mean = brute_force(rates, 1)
    assert last == pytest.approx(best_last) and mean == pytest.approx(best_mean)


@pytest.mark.parametrize("receivers", [2, 3, 4])
def test_no_dealing_of_equal_nodes_to_two_chains_is_better(receivers: int) -> None:
    names = tuple(f"n{i}" for i in range(2 + receivers))
    chosen = plan(
        PlanRequest(names[:2], names[2:], 4_000_000, default_link=NodeLink(1e6, 1e6), overhead_s=0.0, blocks=4)
    )
    assert chosen.considered[CHAIN] == pytest.approx(brute_force([1e6] * len(names), 2)[0])


@settings(max_examples=60, deadline=None)
@given(
    sources=st.integers(1, 3),
    receivers=st.integers(1, 6),
    places=st.lists(st.tuples(st.sampled_from(["", "A", "B"]), st.sampled_from("XY")), min_size=9, max_size=9),
    uplink=st.sampled_from([RATE / 10, RATE, 10 * RATE]),
    rates=st.lists(st.sampled_from([RATE, RATE / 4]), min_size=9, max_size=9),
)
def test_the_choice_is_the_best_candidate_on_any_topology(
    sources: int, receivers: int, places: list[tuple[str, str]], uplink: float, rates: list[float]
) -> None:
    names = tuple("abcdefghi"[: sources + receivers])
    topology = NetworkTopology(
        domains={n: d for n, (d, _) in zip(names, places, strict=False) if d},
        leaves={n: leaf for n, (_, leaf) in zip(names, places, strict=False)},
        uplink_bytes_s={"X": uplink},
    )
    links = {n: NodeLink(rate, rate) for n, rate in zip(names, rates, strict=False)}
    chosen = plan(PlanRequest(names[:sources], names[sources:], NBYTES, links=links, topology=topology, blocks=8))
    near = [[topology.domains.get(a, a) == topology.domains.get(b, b) for b in chosen.nodes] for a in chosen.nodes]
    assert violations(chosen.schedule, near=lambda a, b: near[a][b]) == []
    assert chosen.expected_s <= min(chosen.considered.values()) * 1.15 * (1 + 1e-9)
    assert set(chosen.considered) == set(ALGORITHMS)
    assert sorted(n for group in chosen.groups for n in group) == list(
        range(chosen.schedule.sources, len(chosen.nodes))
    )


def test_what_transfers_show_of_the_topology() -> None:
    """A domain's rate, and an uplink that nobody declared; what crossed it is not held against the nodes."""
    known = NetworkTopology(domains={"a": "ab", "b": "ab"}, leaves={n: leaf for leaf in ("abc", "de") for n in leaf})
    rates = {("a", "b"): 9e9, ("a", "c"): 1e9, ("d", "e"): 1e9, ("c", "d"): 2e8, ("a", "e"): 1e8}
    found, own = split_by_topology(known, rates)
    assert found.domain_bytes_s == {"ab": 9e9} and found.uplink_bytes_s == {"abc": 2e8, "de": 2e8}
    assert own == {("a", "c"): 1e9, ("d", "e"): 1e9}
    declared = NetworkTopology(leaves=known.leaves, uplink_bytes_s={"abc": 4e8, "de": 4e8})
    assert split_by_topology(declared, rates)[0].uplink_bytes_s == {"abc": 4e8, "de": 4e8}
    wide = {("a", "b"): 1e9, ("c", "d"): 9e8}
    assert split_by_topology(NetworkTopology(leaves=known.leaves), wide) == (NetworkTopology(leaves=known.leaves), wide)
