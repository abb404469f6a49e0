"""The fleet as the node agents report it, turned into the scheduler's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from prism.core.ids import DeviceId, Generation, ModelName, NodeId, node_of
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import DeviceKind, DeviceSpec
from prism.wire.messages import AgentReport, ArrivalReport, InstanceReport, LinkReport, PackReport

LOST_AFTER_S: Final = 10.0
"""Agents report every second; a node that is silent for this long is lost. A restarted agent is noticed at once, by its
new incarnation."""
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
    """Instances that serve, as of the last report or of an answer since: if the next report lacks one, it was lost."""
    leaving: bool = False
    weights: str = ""
    """Address of its weight server; "": it has none."""
    packs: list[PackReport] = field(default_factory=list)
    arriving: list[ArrivalReport] = field(default_factory=list)
    disk_bytes_s: float = 0.0
    link_bytes_s: float = 0.0
    links: list[LinkReport] = field(default_factory=list)
    """As of ``seen_s``."""


class Nodes:
    """All nodes that are up. :meth:`report` and :meth:`silent` return events in the order they must be fed."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, Node] = {}
        self._looked_s = 0.0

    def all(self) -> list[Node]:
        return list(self._nodes.values())

    def mailbox_of(self, device: DeviceId) -> str | None:
        """The agent that owns ``device``; None when its node is not up."""
        node = self._nodes.get(node_of(device))
        return None if node is None else node.mailbox

    def report(self, report: AgentReport, now_s: float) -> list[ClusterEvent]:
        """Takes a report in. Instances that served and are missing from it were lost; ones that serve and were not
        known are found (this controller, or the agent's knowledge of it, is new)."""
        events: list[ClusterEvent] = []
        node = self._nodes.get(NodeId(report.node))
        if report.left:
            return [] if self._nodes.pop(NodeId(report.node), None) is None else [NodeLost(NodeId(report.node))]
        if node is not None and node.incarnation != report.incarnation:
            events.append(NodeLost(node.id))
            node = None
        if node is None:
            node = self._join(report, now_s)
            events.append(NodeJoined(node.id, node.devices))
        node.seen_s = now_s
        node.weights, node.packs, node.arriving = report.weights, report.packs, report.arriving
        node.disk_bytes_s, node.link_bytes_s, node.links = report.disk_bytes_s, report.link_bytes_s, report.links
        now = {_key(i): i for i in report.instances}
        words = {InstanceKey(ModelName(s.model), Generation(s.generation)): s.reason for s in report.stillborn}
        events += [InstanceLost(key, words.get(key, "")) for key in sorted(node.serving - now.keys())]
        for key, instance in now.items():
            if instance.state == "active" and key not in node.serving:
                events.append(InstanceFound(key, whole_model(DeviceId(d) for d in instance.devices)))
        node.instances = now
        node.serving = {key for key, instance in now.items() if instance.state == "active"}
        events += [_device_report(report, spec) for spec in node.devices]
        if report.leaving and not node.leaving:
            node.leaving = True
            events.append(OperatorDrain(tuple(spec.id for spec in node.devices)))
        return events

    def answered(self, key: InstanceKey, devices: Iterable[DeviceId]) -> None:
        """Their agent said that the instance serves. It may end before any report shows it: whatever the agent reports
        from now on was sent after its answer."""
        for id in {node_of(device) for device in devices}:
            if (node := self._nodes.get(id)) is not None:
                node.serving.add(key)

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
        for node in lost:
            del self._nodes[node.id]
        return [NodeLost(node.id) for node in lost]

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
            )
            for d in report.devices
        )
        node = Node(NodeId(report.node), report.incarnation, report.mailbox, now_s, devices)
        self._nodes[node.id] = node
        return node


def _key(instance: InstanceReport) -> InstanceKey:
    return InstanceKey(ModelName(instance.model), Generation(instance.generation))


def _device_report(report: AgentReport, spec: DeviceSpec) -> DeviceReport:
    device = next(d for d in report.devices if d.id == spec.id)
    loads = tuple(
        InstanceLoad(
            _key(i),
            i.weight_bytes,
            i.kv_bytes,
            i.kv_idle_bytes,
            i.running if i.devices[0] == spec.id else 0,
            i.waiting if i.devices[0] == spec.id else 0,
            i.served,
            i.idle_s if i.devices[0] == spec.id else 0.0,
        )
        for i in report.instances
        if spec.id in i.devices
    )
    return DeviceReport(spec.id, spec.memory_bytes, device.free_bytes, loads, device.memory_short_s)
