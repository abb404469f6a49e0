"""Chains: every target once, no busy direction, no link used twice, leaves entered once, fast before slow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.multicast.chains import LinkedDevice, SendChain, crossings, group_by_domain, plan_chains

RATES = (1e9, 2e9, 4e9)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[LinkedDevice], list[LinkedDevice]]:
    """Sources and targets: domains of up to four devices, each on one leaf."""

    def some(kind: str, most: int) -> list[LinkedDevice]:
        made = []
        for d in range(draw(st.integers(1, most))):
            leaf, rate = draw(st.sampled_from("XYZ")), draw(st.sampled_from(RATES))
            domain = f"{kind}{d}" if draw(st.booleans()) else ""
            busy = draw(st.lists(st.booleans(), min_size=1, max_size=4))
            made += [LinkedDevice(f"{kind}{d}.{i}", domain, leaf, rate, kind == "s" and b) for i, b in enumerate(busy)]
        return made

    return some("s", 4), some("t", 8)


@settings(max_examples=80, deadline=None)
@given(fleets())
def test_chains_serve_every_target_and_disturb_nobody(fleet: tuple[list[LinkedDevice], list[LinkedDevice]]) -> None:
    sources, targets = fleet
    chains = plan_chains(sources, targets)
    if all(s.sends for s in sources):
        assert chains == ()
        return
    reached = [d.name for chain in chains for group in chain.groups[1:] for d in group.devices]
    assert sorted(reached) == sorted(d.name for d in targets)
    assert not any(d.sends for chain in chains for d in chain.groups[0].devices)
    sends = [pair for chain in chains for hop in range(len(chain.groups) - 1) for pair in chain.shards(hop)]
    assert len({s for s, _ in sends}) == len({r for _, r in sends}) == len(sends), "a direction of a link carries one"
    for chain in chains:
        check_order(chain)


def check_order(chain: SendChain) -> None:
    leaves = [g.leaf for g in chain.groups]
    assert crossings(chain) == len(dict.fromkeys(leaves)) - 1
    for leaf in set(leaves[1:]):
        rates = [g.bytes_s for g in chain.groups[1:] if g.leaf == leaf]
        assert rates == sorted(rates, reverse=True)


@settings(max_examples=40, deadline=None)
@given(fleets())
def test_no_chain_leaves_a_leaf_that_has_a_source_for_it(fleet: tuple[list[LinkedDevice], list[LinkedDevice]]) -> None:
    sources, targets = fleet
    homes = {g.leaf for g in group_by_domain([s for s in sources if not s.sends])}
    for chain in plan_chains(sources, targets):
        for group in chain.groups[1:]:
            assert group.leaf == chain.groups[0].leaf or group.leaf not in homes


def device(name: str, rate: float, domain: str = "", leaf: str = "X") -> LinkedDevice:
    return LinkedDevice(name, domain, leaf, rate)


def test_links_between_machines_are_sharded_over_their_devices() -> None:
    source = [device(f"s{i}", 1e9, "S") for i in range(4)]
    target = [device(f"t{i}", 1e9, "T") for i in range(4)]
    (chain,) = plan_chains(source, target)
    assert chain.shards(0) == [(f"s{i}", f"t{i}") for i in range(4)]
    (single,) = plan_chains(source[:1], target)
    assert single.shards(0) == [("s0", "t0")]


def test_what_stands_beside_a_source_goes_to_its_chain_first() -> None:
    """Over the domain's own links, whatever the switches say."""
    sources = [device("other", 2e9), device("s", 1e9, "S", leaf="Y")]
    chains = plan_chains(sources, [device("fast", 4e9, leaf="Y"), device("beside", 1e9, "S", leaf="Z")])
    assert [[g.devices[0].name for g in c.groups] for c in chains] == [["other"], ["s", "beside", "fast"]]


def test_the_fastest_comes_first_and_the_tail_may_serve() -> None:
    (chain,) = plan_chains([device("s", 1e9)], [device("slow", 1e9), device("fast", 2e9)])
    assert [g.devices[0].name for g in chain.groups] == ["s", "fast", "slow"]
    assert chain.tail is not None
    assert chain.tail.devices[0].name == "slow"
    (idle,) = plan_chains([device("s", 1e9)], [])
    assert idle.tail is None


def test_several_sources_share_the_targets() -> None:
    chains = plan_chains([device("s0", 1e9), device("s1", 2e9)], [device(f"t{i}", 1e9) for i in range(4)])
    assert [len(c.groups) - 1 for c in chains] == [2, 2]
    assert len({c.tail for c in chains}) == 2, "two may serve while they load"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        plan_chains([device("a", 1.0)], [device("a", 1.0)])
    with pytest.raises(ValueError, match="must carry something, got 0"):
        plan_chains([device("a", 1.0)], [device("b", 0.0)])
