"""Where weights are, and who sends them to a node that lacks them.

A model on its way to several nodes makes a chain, as the multicast of pieces does
(:mod:`prism.policy.multicast.chains`): each node passes on what it has, so that whoever has the model sends it once.
Whose outgoing direction carries other traffic passes nothing on while there is anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from prism.core.ids import ModelName, NodeId
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import LoadSection
from prism.sim.fetch import Fetcher
from prism.sim.host_cache import HostCache
from prism.sim.links import Link, Network
from prism.sim.topology import Topology


@dataclass(slots=True)
class _OnItsWay:
    """A model on its way to a node."""

    parts: tuple[float, ...]
    """In which it comes, in the order of asking."""
    here: int = 0
    """Of these, those that have come."""


@dataclass(frozen=True, slots=True)
class WeightRoads:
    """Where weights are and what they travel over, of one world."""

    network: Network
    topology: Topology
    host_cache: HostCache
    fetcher: Callable[[NodeId], Fetcher]
    """What brings weights to a node."""
    load: LoadSection
    _arriving: dict[tuple[ModelName, int], dict[NodeId, _OnItsWay]] = field(default_factory=dict)
    """Nodes to which a model is on its way, in the order of asking, by the sub-group that they are in. A node keeps its
    place until it has the last part."""

    def sends(self, node: NodeId) -> bool:
        """Its outgoing direction carries something."""
        return node in self.topology.nodes and bool(self.topology.nodes[node].nic_up.flows)

    def arriving_parts(self, node: NodeId, model: ModelName, group: int) -> tuple[float, ...]:
        """The parts in which the model is on its way there; none: it is not."""
        arriving = self._arriving.get((model, group), {}).get(node)
        return () if arriving is None else arriving.parts

    def source_path(
        self, node: NodeId, model: ModelName, parts: tuple[float, ...], part: int, group: int = 0
    ) -> tuple[Link, ...]:
        """What the ``part``-th of ``parts`` crosses before it is in the memory of ``node``, which has its place in the
        chain from now on; nothing when it is there. ``group``: its sub-group, which gets the weights from a holder of
        its own."""
        if self.host_cache.has(node, model):
            return ()
        chain = self._arriving.setdefault((model, group), {})
        mine = chain.setdefault(node, _OnItsWay(parts))
        if mine.parts == parts and part < mine.here:
            return ()
        source = self._free([*takewhile(lambda other: other != node, chain)][::-1])
        if source is None and (holders := self.host_cache.holders(model)):
            source = self._free(holders[group % len(holders) :] + holders[: group % len(holders)])
        if source is None or source not in self.topology.nodes:
            return (self.topology.nodes[node].ssd,)
        return self.topology.network_path(source, node)

    def arrived(self, node: NodeId, spec: ModelSpec, parts: tuple[float, ...], part: int, group: int = 0) -> None:
        """The ``part``-th of ``parts`` came; with the last one the node has the model, and holds no place any more."""
        chain = self._arriving.get((spec.name, group), {})
        if part == len(parts) - 1:
            chain.pop(node, None)
            self.host_cache.keep(node, spec.name, spec.weight_bytes)
        elif node in chain and chain[node].parts == parts:
            chain[node].here = max(chain[node].here, part + 1)

    def gave_up(self, node: NodeId, model: ModelName, group: int = 0) -> None:
        """Nothing is on its way there any more."""
        self._arriving.get((model, group), {}).pop(node, None)

    def _free(self, nodes: Sequence[NodeId]) -> NodeId | None:
        """The first that sends nothing yet, else the first; None: there is none."""
        return next((node for node in nodes if not self.sends(node)), nodes[0] if nodes else None)
