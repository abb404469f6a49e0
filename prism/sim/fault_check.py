"""What is wrong with a ``faults`` section, found before a run: the fleet's names are walked through its changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from prism.core.ids import DeviceId, NodeId, device_id, node_of
from prism.sim.cluster_sections import Cluster, FaultSection, NodeGroup
from prism.sim.gpus import gpu

_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Mistake:
    """One wrong value of ``faults[index].key``."""

    index: int
    key: str
    value: Any
    why: str
    choices: tuple[str, ...] = ()


def fault_mistakes(cluster: Cluster) -> list[Mistake]:
    """Targets that do not exist at their time, and settings that have no meaning for their kind."""
    fleet = _Fleet(cluster)
    order = sorted(enumerate(cluster.faults), key=lambda item: item[1].at)
    found = [mistake for index, fault in order for mistake in _look(index, fault, fleet)]
    return sorted(found, key=lambda mistake: mistake.index)


def _look(index: int, fault: FaultSection, fleet: _Fleet) -> Iterator[Mistake]:
    if fault.kind == "straggler" and fault.speed is None:
        yield Mistake(index, "speed", None, "is required for a straggler: the share of its speed that it keeps")
    if fault.kind != "straggler" and fault.speed is not None:
        yield Mistake(index, "speed", fault.speed, f"means nothing to {fault.kind}")
    target = fault.target
    match fault.kind:
        case "node_added":
            known = {group.gpu: group for group in reversed(fleet.groups)}
            if target and target not in known:
                yield Mistake(index, "target", target, "no group has this GPU", tuple(sorted(known)))
            else:
                fleet.add_node(known[target] if target else fleet.groups[0])
        case "node_fails" | "gpu_added":
            if target not in fleet.nodes:
                yield Mistake(index, "target", target, "no such node is up then", _near(target, list(fleet.nodes)))
            elif fault.kind == "node_fails":
                del fleet.nodes[target]
            else:
                fleet.nodes[target].add_device()
        case _:
            name, _, model = target.partition(" ")
            if fault.kind == "engine_dies" and not model:
                yield Mistake(index, "target", target, "must be a device and a model, like 'node0/cuda:0 my-model'")
            elif (fault.kind != "engine_dies" and model) or not fleet.has(name):
                yield Mistake(index, "target", target, "no such device is up then", _near(target, fleet.devices()))
            elif fault.kind == "gpu_fails":
                fleet.node_of(name).devices.remove(name)


@dataclass
class _Node:
    name: str
    kind: str
    """Of its devices, as their names have it."""
    made: int = 0
    devices: list[str] = field(default_factory=list)

    def add_device(self) -> None:
        self.devices.append(str(device_id(NodeId(self.name), self.kind, self.made)))
        self.made += 1


class _Fleet:
    """Names as :class:`prism.sim.machines.Machines` gives them."""

    def __init__(self, cluster: Cluster) -> None:
        self.groups = cluster.groups
        self.nodes: dict[str, _Node] = {}
        self._made = 0
        for group in cluster.groups:
            for _ in range(group.nodes):
                self.add_node(group)

    def add_node(self, group: NodeGroup) -> None:
        node = _Node(f"node{self._made}", gpu(group.gpu).device_kind.value)
        self._made += 1
        for _ in range(group.gpus_per_node):
            node.add_device()
        self.nodes[node.name] = node

    def node_of(self, device: str) -> _Node:
        return self.nodes[node_of(DeviceId(device))]

    def has(self, device: str) -> bool:
        node = self.nodes.get(node_of(DeviceId(device)))
        return node is not None and device in node.devices

    def devices(self) -> list[str]:
        return [device for node in self.nodes.values() for device in node.devices]


def _near(name: str, known: list[str]) -> tuple[str, ...]:
    """All choices when they are few, else those that resemble ``name``, else the first ones."""
    if len(known) <= _SHOWN:
        return tuple(known)
    return tuple(get_close_matches(name, known, n=_SHOWN) or known[:_SHOWN])
