"""Chains that carry a model to new devices without disturbing who serves (BlitzScale 5.1): pruned, grouped, dealt.

::

    source group --> target group --> target group      each arrow one link between machines, or several in parallel:
    (NVLink: 4)      (NVLink: 4)      (NVLink: 2)       4 shards, then 2; inside a group the shards are gathered

In a serial chain every group passes on what it has while it gets the rest, so that its length costs one block a hop
(:mod:`prism.policy.multicast.chain_schedule` says which block goes when). The last group of a chain passes nothing on:
its outgoing direction is free, and it may serve while it loads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class LinkedDevice:
    """A device as a chain sees it."""

    name: str
    domain: str
    """Devices with fast links between them, which copy to each other in no time; "" : none but itself."""
    leaf: str
    """The switch it hangs on."""
    bytes_s: float
    """Of its own link to the leaf, each way."""
    sends: bool = False
    """Its outgoing direction carries traffic of what it serves."""


@dataclass(frozen=True, slots=True)
class ChainGroup:
    """Devices of one domain, fastest first."""

    devices: tuple[LinkedDevice, ...]

    @property
    def bytes_s(self) -> float:
        return sum(d.bytes_s for d in self.devices)

    @property
    def leaf(self) -> str:
        return self.devices[0].leaf

    @property
    def domain(self) -> str:
        return self.devices[0].domain


@dataclass(frozen=True, slots=True)
class SendChain:
    """A source and whom it serves, one after the other."""

    groups: tuple[ChainGroup, ...]

    @property
    def tail(self) -> ChainGroup | None:
        """Those that pass nothing on, and may serve while they load; None: the chain has no target."""
        return self.groups[-1] if len(self.groups) > 1 else None

    def shards(self, hop: int) -> list[tuple[str, str]]:
        """Who sends to whom on the ``hop``-th arrow: as many shards as both sides have devices for."""
        sender, receiver = self.groups[hop], self.groups[hop + 1]
        return [(s.name, r.name) for s, r in zip(sender.devices, receiver.devices, strict=False)]


def plan_chains(sources: Sequence[LinkedDevice], targets: Sequence[LinkedDevice]) -> tuple[SendChain, ...]:
    """Chains that reach every target once; none at all when every source is busy sending.

    1. Sources whose outgoing direction carries traffic are dropped.
    2. Both sides are grouped by domain, and ordered by decreasing speed of their links together: what loads first
       should be what loads fastest.
    3. Each group goes to the shortest chain that starts in its domain, else in its leaf, else to the shortest of all;
       equal ones by speed.
    4. In a chain what is in the source's domain comes first, then its leaf, then leaf by leaf, so that every leaf is
       entered once.

    Raises ``ValueError`` when a device is named twice or a link has no speed.
    """
    _check_devices([*sources, *targets])
    starts = group_by_domain([s for s in sources if not s.sends])
    if not starts:
        return ()
    dealt: list[list[ChainGroup]] = [[] for _ in starts]
    for group in group_by_domain(targets):
        joined = [i for i, start in enumerate(starts) if group.domain and start.domain == group.domain]
        near = joined or [i for i, start in enumerate(starts) if start.leaf == group.leaf]
        index = min(near or range(len(starts)), key=lambda i: (len(dealt[i]), -starts[i].bytes_s, i))
        dealt[index].append(group)
    return tuple(SendChain((start, *_by_leaf(start, mine))) for start, mine in zip(starts, dealt, strict=True))


def group_by_domain(devices: Sequence[LinkedDevice]) -> list[ChainGroup]:
    """Fastest group first, equal ones as given. A domain whose devices hang on several leaves is one group at the leaf
    of its fastest."""
    domains: defaultdict[str, list[LinkedDevice]] = defaultdict(list)
    for device in devices:
        domains[f"domain {device.domain}" if device.domain else f"device {device.name}"].append(device)
    groups = [ChainGroup(tuple(sorted(d, key=lambda x: -x.bytes_s))) for d in domains.values()]
    return sorted(groups, key=lambda g: -g.bytes_s)


def crossings(chain: SendChain) -> int:
    """Arrows of the chain that leave their leaf."""
    return sum(a.leaf != b.leaf for a, b in pairwise(chain.groups))


def _by_leaf(home: ChainGroup, groups: Sequence[ChainGroup]) -> list[ChainGroup]:
    joined = [g for g in groups if g.domain and g.domain == home.domain]
    rest = [g for g in groups if g not in joined]
    order: dict[str, None] = dict.fromkeys([home.leaf, *(g.leaf for g in rest)])
    return joined + [g for leaf in order for g in rest if g.leaf == leaf]


def _check_devices(devices: Sequence[LinkedDevice]) -> None:
    if len({d.name for d in devices}) != len(devices):
        raise ValueError(f"a device is named twice among {[d.name for d in devices]}")
    for device in devices:
        if device.bytes_s <= 0:
            raise ValueError(f"the link of {device.name} must carry something, got {device.bytes_s} bytes/s")
