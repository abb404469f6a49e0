"""The fleet as the node agents report it, turned into the scheduler's events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from prism.core.events import (
    ClusterEvent,
    DeviceReport,
    InstanceFound,
    InstanceLoad,
    InstanceLost,
    NodeJoined,
    NodeLost,
    OperatorDrain,
)
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.instances import InstanceKey, Parts, devices_of, parts_by_node, queue_device
from prism.core.specs import DeviceKind, DeviceSpec
from prism.core.views import InstanceState
from prism.wire.messages import AgentReport
from prism.wire.reports import ArrivalReport, EngineDeath, InstanceReport, LinkReport, PackReport

LOST_AFTER_S: Final = 30.0
"""Agents report every second; a node that is silent for this long is lost. A restarted agent is noticed at once, by its
new incarnation. Long, since an agent whose connection lives is starved as a rule: with ten thousand requests on two
cores that were busy with other work one was silent for more than ten seconds, and all it ran was begun again."""
BROKEN_AFTER_S: Final = 2.0
"""The same for a node to which the connection is broken: its agent ended, or its machine does not answer. A starved
process keeps its connections, so this may be short."""
MOST_PER_LOOK_S: Final = 2.0
"""Silence that one look at the nodes can find: after more, this process was the one that stood still."""


@dataclass(slots=True)
class Node:
    """One machine of the fleet."""

    id: NodeId
    incarnation: str
    mailbox: str
    seen_s: float
    devices: tuple[DeviceSpec, ...]
    instances: dict[InstanceKey, InstanceReport] = field(default_factory=dict)
    serving: set[InstanceKey] = field(default_factory=set)
    """Instances whose parts here serve, as of the last report or of an answer since: if the next report lacks one, it
    was lost."""
    leaving: bool = False
    faults: dict[DeviceId, str] = field(default_factory=dict)
    """Devices on which no engine can run, and why. They are drained until that is over."""
    weights: str = ""
    """Address of its weight server; "": it has none."""
    packs: list[PackReport] = field(default_factory=list)
    deaths: list[EngineDeath] = field(default_factory=list)
    arriving: list[ArrivalReport] = field(default_factory=list)
    kv_bytes: int = 0
    host_bytes: int = 0
    disk_bytes_s: float = 0.0
    link_bytes_s: float = 0.0
    links: list[LinkReport] = field(default_factory=list)
    """As of ``seen_s``."""

    def shown_instances(self) -> list[dict[str, object]]:
        """For operators' views."""
        return [instance.as_dict(self.id) for instance in self.instances.values()]


class FleetNodes:
    """All nodes that are up. :meth:`report` and :meth:`silent` return events in the order they must be fed."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, Node] = {}
        self._looked_s = 0.0
        self._serving: set[InstanceKey] = set()
        """Instances whose parts all serve: the scheduler knows them."""
        self._loading: dict[InstanceKey, Parts] = {}
        """Instances that were loading when their machines joined: an earlier controller has ordered them."""
        self._remains: set[InstanceKey] = set()
        """Instances that were lost while other machines have parts of them."""
        self._stray_since_s: dict[InstanceKey, float] = {}

    def all(self) -> list[Node]:
        return list(self._nodes.values())

    def mailbox_of(self, node: NodeId) -> str | None:
        """Where its agent is reached; None when it is not up."""
        known = self._nodes.get(node)
        return None if known is None else known.mailbox

    def fresh_in(self, report: AgentReport) -> set[ModelName]:
        """Models of instances that serve by ``report`` and did not before, or are loading when the machine joins."""
        node = self._nodes.get(NodeId(report.node))
        if node is None or node.incarnation != report.incarnation:
            return {i.key.model for i in report.instances if i.state in (InstanceState.READY, InstanceState.LOADING)}
        known = self._serving
        return {i.key.model for i in report.instances if i.state is InstanceState.READY and i.key not in known}

    def report(self, report: AgentReport, now_s: float) -> list[ClusterEvent]:
        """Takes a report in. Instances that served and are missing from it were lost; ones that serve, on all their
        machines, and were not known are found (this controller, or the agent's knowledge of it, is new), and, when a
        machine joins, ones that are loading."""
        events: list[ClusterEvent] = []
        joins = False
        node = self._nodes.get(NodeId(report.node))
        if report.left:
            return [] if node is None else [self._drop(node)]
        if node is not None and node.incarnation != report.incarnation:
            events.append(self._drop(node))
            node = None
        if node is None:
            node, joins = self._join(report, now_s), True
        node.seen_s = now_s
        node.weights, node.packs, node.arriving = report.weights, report.packs, report.arriving
        node.deaths, node.host_bytes = report.deaths, report.host_bytes
        node.kv_bytes = report.kv_bytes
        node.disk_bytes_s, node.link_bytes_s, node.links = report.disk_bytes_s, report.link_bytes_s, report.links
        instances = self._instances(node, report)
        if joins:
            instances += self._found_loading(node)
            found = tuple(event for event in instances if isinstance(event, InstanceFound))
            events.append(NodeJoined(node.id, node.devices, found))
        else:
            events += instances
        events += [_device_report(report, spec) for spec in node.devices]
        if report.leaving and not node.leaving:
            node.leaving = True
            events.append(OperatorDrain(tuple(spec.id for spec in node.devices)))
        return events + self._faults(node, report)

    def _faults(self, node: Node, report: AgentReport) -> list[ClusterEvent]:
        before, node.faults = node.faults, {DeviceId(d.id): d.fault for d in report.devices if d.fault}
        broken, mended = sorted(node.faults.keys() - before.keys()), sorted(before.keys() - node.faults.keys())
        events: list[ClusterEvent] = []
        if broken:
            events.append(OperatorDrain(tuple(broken), carry=True))
        if mended and not node.leaving:
            events.append(OperatorDrain(tuple(mended), on=False))
        return events

    def _instances(self, node: Node, report: AgentReport) -> list[InstanceLost | InstanceFound]:
        """None is lost when the node has just joined."""
        events: list[InstanceLost | InstanceFound] = []
        words = {engine.key: engine.reason for engine in report.stillborn}
        now = {i.key: i for i in report.instances}
        serving = {key for key, instance in now.items() if instance.state is InstanceState.READY}
        for key in sorted(node.serving - serving):
            if key not in now and key in self._serving:
                events.append(InstanceLost(key, words.get(key, "")))
                self._remains.add(key)
            self._serving.discard(key)
        for key, parts in list(self._loading.items()):
            if key not in now and node.id in parts_by_node(parts):
                del self._loading[key]
                events.append(InstanceLost(key))
        node.instances, node.serving = now, serving
        for key in sorted(serving - self._serving):
            if self._is_complete(key, now[key].parts):
                self._serving.add(key)
                self._loading.pop(key, None)
                events.append(InstanceFound(key, now[key].parts))
        return events

    def _found_loading(self, node: Node) -> list[InstanceLost | InstanceFound]:
        """Instances of the machine, which has just joined, that all their machines have, and that do not serve yet."""
        begun, events = (InstanceState.LOADING, InstanceState.READY), list[InstanceLost | InstanceFound]()
        for key, instance in node.instances.items():
            nodes = [self._nodes.get(id) for id in parts_by_node(instance.parts)]
            there = [None if one is None else one.instances.get(key) for one in nodes]
            if key not in self._serving and all(one is not None and one.state in begun for one in there):
                self._loading[key] = instance.parts
                events.append(InstanceFound(key, instance.parts, loading=True))
        return events

    def answered(self, key: InstanceKey, parts: Parts) -> None:
        """The agents of all its parts said that the instance serves. It may end before any report shows it: whatever
        they report from now on was sent after their answers."""
        self._serving.add(key)
        self._loading.pop(key, None)
        for id in parts_by_node(parts):
            if (node := self._nodes.get(id)) is not None:
                node.serving.add(key)

    def _is_complete(self, key: InstanceKey, parts: Parts) -> bool:
        return all(id in self._nodes and key in self._nodes[id].serving for id in parts_by_node(parts))

    def strays(self, now_s: float) -> list[tuple[InstanceKey, list[NodeId]]]:
        """Instances of which only some parts serve, and the machines of these: the others were lost, or have not been
        heard of for :data:`LOST_AFTER_S`. Ask every second."""
        found: dict[InstanceKey, list[NodeId]] = {}
        for node in self._nodes.values():
            for key in node.serving - self._serving:
                found.setdefault(key, []).append(node.id)
        self._stray_since_s = {key: self._stray_since_s.get(key, now_s) for key in found}
        self._remains &= found.keys()
        return [
            (key, nodes)
            for key, nodes in found.items()
            if key in self._remains or now_s - self._stray_since_s[key] > LOST_AFTER_S
        ]

    def _drop(self, node: Node) -> NodeLost:
        del self._nodes[node.id]
        self._remains |= node.serving & self._serving
        self._serving -= node.serving
        self._loading = {key: parts for key, parts in self._loading.items() if node.id not in parts_by_node(parts)}
        return NodeLost(node.id)

    def silent(self, now_s: float, broken: Callable[[str], bool] = lambda mailbox: False) -> list[ClusterEvent]:
        """Drops the nodes that have not reported for :data:`LOST_AFTER_S`, or for :data:`BROKEN_AFTER_S` when the
        connection to their mailbox is ``broken``. (The agent on this machine is looked after by its supervisor.)

        Call it every second. Who stood still meanwhile has not read what the nodes said, so that the time between two
        looks counts as :data:`MOST_PER_LOOK_S` of silence at most."""
        not_theirs_s = max(0.0, now_s - self._looked_s - MOST_PER_LOOK_S)
        self._looked_s = now_s
        for node in self._nodes.values():
            node.seen_s = min(now_s, node.seen_s + not_theirs_s)

        def patience_s(node: Node) -> float:
            return BROKEN_AFTER_S if node.mailbox.startswith("tcp://") and broken(node.mailbox) else LOST_AFTER_S

        lost = [node for node in self._nodes.values() if now_s - node.seen_s > patience_s(node)]
        return [self._drop(node) for node in lost]

    def _join(self, report: AgentReport, now_s: float) -> Node:
        devices = tuple(
            DeviceSpec(
                DeviceId(d.id),
                NodeId(report.node),
                DeviceKind(d.kind),
                d.capacity_bytes,
                d.domain,
                d.page_bytes,
                d.weight_page_bytes,
                d.max_engines,
                d.engine_bytes,
                d.pace,
            )
            for d in report.devices
        )
        node = Node(NodeId(report.node), report.incarnation, report.mailbox, now_s, devices)
        self._nodes[node.id] = node
        return node


def _device_report(report: AgentReport, spec: DeviceSpec) -> DeviceReport:
    device = next(d for d in report.devices if d.id == spec.id)
    loads = tuple(
        InstanceLoad(
            i.key,
            i.weight_bytes,
            i.kv_bytes,
            i.kv_idle_bytes,
            i.running if queue_device(i.parts) == spec.id else 0,
            i.waiting if queue_device(i.parts) == spec.id else 0,
            i.served,
            i.idle_s if queue_device(i.parts) == spec.id else 0.0,
            i.waited_s if queue_device(i.parts) == spec.id else 0.0,
            i.token_s if queue_device(i.parts) == spec.id else 0.0,
        )
        for i in report.instances
        if spec.id in devices_of(i.parts)
    )
    return DeviceReport(spec.id, device.capacity_bytes, device.free_bytes, loads, device.memory_short_s)
