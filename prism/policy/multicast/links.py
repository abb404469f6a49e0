"""What each node's link carries, from what transfers between pairs of nodes reached. Pure.

A transfer from s to d runs at the slower of s's outgoing and d's incoming rate
(:mod:`prism.policy.multicast.estimate`), so that one measured pair does not say which end was slow. Three steps tell as
much as can be told:

1. A link carries at least its best transfer, each way.
2. An end is *held back* in a transfer when the other end is known to be the slow one: that receiver got no more from
   anybody although somebody that sent to it sends faster elsewhere (and the other way round). A side that was held back
   in all its transfers is unknown.
3. Rates that differ from the typical one (the median of the known sides) by less than :data:`SAME` are that: noise
   makes no plan slower to find, or other than that for equal links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from prism.policy.multicast.estimate import NodeLink
from prism.policy.multicast.topology import NetworkTopology

SAME: Final = 0.6
"""Rates within this factor of each other are taken for one: two nodes that share a busy processor differ by as much."""

PairRates = Mapping[tuple[str, str], float]
"""Bytes per second, all above 0, by (sending node, receiving node)."""


@dataclass(frozen=True, slots=True)
class KnownLinks:
    """``typical``: the rate of a side that nothing is known of; None: nothing was measured at all."""

    links: Mapping[str, NodeLink] = field(default_factory=dict)
    typical: float | None = None


def estimate_links(rates: PairRates) -> KnownLinks:
    """The link of every node that took part in a measured transfer."""
    if not rates:
        return KnownLinks()
    turned = {(receiver, sender): rate for (sender, receiver), rate in rates.items()}
    out, inward = _sides(rates), _sides(turned)
    typical = median([s.best for s in (*out.values(), *inward.values()) if not s.held_back] or list(rates.values()))

    def rate_of(side: _Side | None) -> float:
        if side is None or side.held_back:
            return typical if side is None else max(typical, side.best)
        return typical if typical * SAME <= side.best <= typical / SAME else side.best

    nodes = sorted({node for pair in rates for node in pair})
    return KnownLinks({node: NodeLink(rate_of(out.get(node)), rate_of(inward.get(node))) for node in nodes}, typical)


def split_by_topology(declared: NetworkTopology, rates: PairRates) -> tuple[NetworkTopology, PairRates]:
    """What transfers showed beside what is declared: the topology with it, and the pairs whose rates say something of
    their nodes' own links.

    1. Transfers inside a domain say what the domain carries.
    2. A leaf whose best transfer to or from another one is below :data:`SAME` of the best
       inside it has an uplink of that rate, unless one is declared. What crossed it says nothing of the nodes.
    """
    domain_bytes_s: dict[str, float] = {}
    inside: dict[str, float] = {}
    across: dict[str, float] = {}
    for (source, node), rate in rates.items():
        ends = declared.leaves.get(source, ""), declared.leaves.get(node, "")
        if node in declared.near(source):
            domain = declared.domains[source]
            domain_bytes_s[domain] = max(domain_bytes_s.get(domain, 0.0), rate)
        elif ends[0] == ends[1]:
            inside[ends[0]] = max(inside.get(ends[0], 0.0), rate)
        else:
            across |= {leaf: max(across.get(leaf, 0.0), rate) for leaf in ends}
    narrow = {leaf: rate for leaf, rate in across.items() if rate < SAME * inside.get(leaf, 0.0)}
    uplinks = {**narrow, **declared.uplink_bytes_s}
    own = {
        (source, node): rate
        for (source, node), rate in rates.items()
        if node not in declared.near(source) and not _crosses(declared, source, node, uplinks)
    }
    both = {**declared.domain_bytes_s, **domain_bytes_s}
    return replace(declared, domain_bytes_s=both, uplink_bytes_s=uplinks), own


def _crosses(topology: NetworkTopology, source: str, node: str, uplinks: Mapping[str, float]) -> bool:
    ends = {topology.leaves.get(source, ""), topology.leaves.get(node, "")}
    return len(ends) > 1 and any(leaf in uplinks for leaf in ends)


@dataclass(frozen=True, slots=True)
class _Side:
    """One direction of a node's link: its best transfer, and whether the other ends were what kept it there."""

    best: float
    held_back: bool


def _sides(rates: PairRates) -> dict[str, _Side]:
    """The direction of every first end."""
    first: dict[str, float] = defaultdict(float)
    second: dict[str, float] = defaultdict(float)
    for (one, other), rate in rates.items():
        first[one], second[other] = max(first[one], rate), max(second[other], rate)
    slow = dict.fromkeys(second, False)
    for one, other in rates:  # somebody who can do better elsewhere did not do better here
        slow[other] = slow[other] or first[one] * SAME > second[other]
    free = {one for (one, other), rate in rates.items() if not slow[other] or rate < second[other] * SAME}
    return {one: _Side(best, one not in free) for one, best in first.items()}
