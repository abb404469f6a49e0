"""Which nodes copy to each other over links of their own, and which switch each hangs on. Pure.

::

    spine     |uplink A|          |uplink B|        shared by all nodes of a leaf switch, each way
    leaf      A          A          B       B
    node      a ======== b          c ===== d       ===: a fast domain (NVLink across nodes, or the memory of one
                                                    machine that has an agent for each of its network cards)

Who hangs where is declared (the catalog's ``topology``); what links carry is declared or measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DOMAIN_BYTES_S: Final = 50e9
"""Between nodes of a fast domain, where nothing is known: 400 Gbit/s."""


@dataclass(frozen=True, slots=True)
class NetworkTopology:
    """Of a fleet. Nodes that are missing here are in no domain, and all hang on one switch."""

    domains: Mapping[str, str] = field(default_factory=dict)
    """Node -> fast domain."""
    leaves: Mapping[str, str] = field(default_factory=dict)
    """Node -> leaf switch."""
    domain_bytes_s: Mapping[str, float] = field(default_factory=dict)
    """Domain -> what one node of it sends to another."""
    uplink_bytes_s: Mapping[str, float] = field(default_factory=dict)
    """Leaf -> what all its nodes together send to other leaves, and get from there; missing: as much as they can."""

    def near(self, node: str) -> frozenset[str]:
        """The others of its domain."""
        domain = self.domains.get(node)
        return frozenset(n for n, d in self.domains.items() if d == domain and n != node) if domain else frozenset()

    def wiring(self, nodes: Sequence[str]) -> Wiring | None:
        """Of these nodes; None where it changes no transfer between them: no two are in one domain, and no leaf whose
        uplink is known has some of them while others are elsewhere."""
        domains = [self.domains.get(node, "") for node in nodes]
        leaves = [self.leaves.get(node, "") for node in nodes]
        shared = any(d and domains.count(d) > 1 for d in set(domains))
        if not shared and (len(set(leaves)) == 1 or not any(leaf in self.uplink_bytes_s for leaf in leaves)):
            return None
        numbers = {leaf: number for number, leaf in enumerate(dict.fromkeys(leaves))}
        places = {domain: number for number, domain in enumerate(dict.fromkeys(domains)) if domain}
        return Wiring(
            domain=np.array([places.get(domain, -1) for domain in domains], dtype=np.int64),
            domain_bytes_s=np.array([self.domain_bytes_s.get(d, DOMAIN_BYTES_S) for d in domains]),
            leaf=np.array([numbers[leaf] for leaf in leaves], dtype=np.int64),
            uplink_bytes_s=np.array([self.uplink_bytes_s.get(leaf, np.inf) for leaf in numbers]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """A topology in the numbers of a schedule's nodes."""

    domain: Ints
    """``[node]``; -1: in none."""
    domain_bytes_s: Floats
    """``[node]``: of its domain."""
    leaf: Ints
    """``[node]``."""
    uplink_bytes_s: Floats
    """``[leaf]``."""

    def near(self, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32]) -> Bools:
        """Which of these transfers stay in a domain."""
        return np.asarray((self.domain[src] == self.domain[dst]) & (self.domain[src] >= 0))

    def rates(self, src: npt.NDArray[np.int32], dst: npt.NDArray[np.int32], link_bytes_s: Floats) -> Floats:
        """Of transfers that run at the same time and would have ``link_bytes_s`` by the nodes' own links: those that
        leave a leaf share its uplink evenly, those inside a domain have its rate."""
        near = self.near(src, dst)
        out, inward = self.leaf[src], self.leaf[dst]
        away = (out != inward) & ~near
        rates = link_bytes_s.copy()
        for side in (out, inward):
            at_once = np.maximum(np.bincount(side[away], minlength=self.uplink_bytes_s.size), 1)
            rates[away] = np.minimum(rates[away], (self.uplink_bytes_s / at_once)[side[away]])
        rates[near] = self.domain_bytes_s[src[near]]
        return rates
