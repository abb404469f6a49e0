"""Weights between machines: for activations that are about to be ordered, who sends what to whom.

All activations of one decision that need the same pack share one multicast; one that comes later joins the multicast
that still runs. A machine that has the pack in memory takes nothing; one that has it on disk only does when the network
is measured to be faster than its disk.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from prism.controller.companions import LiveCompany, company_of, instances_per_node
from prism.controller.images import ModelImages
from prism.controller.nodes import FleetNodes, Node
from prism.controller.sent_weights import SentWeights, sent_weights
from prism.core.effects import Activate
from prism.core.ids import DeviceId, ModelName, NodeId, node_of
from prism.core.instances import InstanceKey, parts_by_node
from prism.core.settings import LiveMode
from prism.core.specs import DeviceKind
from prism.policy.live.pipelines import ExecutionPipeline, LiveRequest, plan_live
from prism.policy.multicast.estimate import NodeLink
from prism.policy.multicast.links import PairRates, estimate_links, split_by_topology
from prism.policy.multicast.planner import LIVE_BLOCKS, TEN_GIGABIT, Plan, PlanRequest, end_blocks, first_blocks, plan
from prism.policy.multicast.topology import NetworkTopology
from prism.scheduler.beginnings import pipelined
from prism.transfer.session import NodePlan, node_plans
from prism.weights.exchange.pack_windows import window_name
from prism.weights.packs.format import PackKey
from prism.weights.store.whereabouts import SourceRates, Tier, Whereabouts
from prism.wire.commands import Distribute
from prism.wire.reports import PackReport

LINK_KNOWN_S: Final = 600.0
"""For so long the rate that a transfer reached is believed."""
RUNS_S: Final = 10.0
"""A multicast that no receiver has reported for so long is over."""


@dataclass(frozen=True, slots=True)
class Supply:
    """How one machine of an activation gets its weights (see :class:`prism.wire.commands.ActivateCommand`)."""

    mark: str = ""
    plans: tuple[bytes, ...] = ()
    peers: Mapping[str, str] = field(default_factory=dict)
    company: LiveCompany = field(default_factory=LiveCompany)


Supplies = dict[InstanceKey, dict[NodeId, Supply]]
"""By instance and machine."""


@dataclass(slots=True)
class _Running:
    sent: SentWeights
    parts: dict[str, NodePlan]
    """The first receivers' and sources' parts, by node."""
    addresses: dict[str, str]
    seen_s: float
    receivers: set[str] = field(default_factory=set)
    late: frozenset[str] = frozenset()
    """Of these, those to which embedding and head come behind layers."""


class WeightDistribution:
    """One per controller; reads ``nodes``, sends nothing. ``topology``: what is declared of the fleet's network."""

    def __init__(self, nodes: FleetNodes, topology: NetworkTopology | None = None) -> None:
        self._nodes, self._topology = nodes, topology or NetworkTopology()
        self._running: dict[PackKey, _Running] = {}

    def running(self) -> list[SentWeights]:
        """Multicasts that are not known to be over."""
        return [running.sent for running in self._running.values()]

    def supply(
        self, orders: Sequence[Activate], images: Mapping[ModelName, ModelImages], now_s: float
    ) -> tuple[Supplies, list[tuple[str, Distribute]]]:
        """Supplies of the activations, and messages (mailbox, message) to the machines that send. ``images``: what the
        engines of each model look for. Does no I/O: this is in the path of every decision."""
        self._forget(now_s)
        nodes = {node.id: node for node in self._nodes.all() if node.weights}
        plans: dict[tuple[InstanceKey, NodeId], list[bytes]] = {}
        sends: list[tuple[str, Distribute]] = []
        pipelines: dict[ModelName, list[ExecutionPipeline]] = {}
        late: dict[ModelName, set[str]] = {}
        for key, group in self._wanted(orders, images, nodes).items():
            layers = images[group[0][0].model].layers
            given, sources, planned = self._multicast(key, group, nodes, layers, now_s)
            sends += sources
            model = group[0][0].model
            pipelines.setdefault(model, []).extend(planned)
            late.setdefault(model, set()).update(self._running[key].late if planned else ())
            for order, node in group:
                if node in given:
                    plans.setdefault((order.key, node), []).append(msgspec.msgpack.encode(given[node]))
        company: dict[InstanceKey, LiveCompany] = {}
        for model in dict.fromkeys(order.model for order in orders):
            mine = [order for order in orders if order.model == model]
            company |= company_of(mine, pipelines.get(model, ()), nodes.values(), late.get(model, set()))
        supplies: Supplies = {}
        for order in orders:
            mark = images[order.model].mark
            for node in parts_by_node(order.parts):
                peers = {str(n.id): n.weights for n in nodes.values() if n.id != node}
                there = company.get(order.key, LiveCompany())
                supply = Supply(mark, tuple(plans.get((order.key, node), ())), peers, there)
                supplies.setdefault(order.key, {})[node] = supply
        return supplies, sends

    def _wanted(
        self,
        orders: Sequence[Activate],
        images: Mapping[ModelName, ModelImages],
        nodes: Mapping[NodeId, Node],
    ) -> dict[PackKey, list[tuple[Activate, NodeId]]]:
        """Packs that should come over the network, and who needs them."""
        wanted: dict[PackKey, list[tuple[Activate, NodeId]]] = {}
        for order in orders:
            for node in (nodes[id] for id in parts_by_node(order.parts) if id in nodes):
                for key in images[order.model].by_kind.get(_kind_of(order, node), ()):
                    if self._from_network(key, node, nodes):
                        wanted.setdefault(key, []).append((order, node.id))
        return wanted

    def _from_network(self, key: PackKey, node: Node, nodes: Mapping[NodeId, Node]) -> bool:
        here = _pack(node, key)
        remote = tuple(str(n.id) for n in nodes.values() if n is not node and _pack(n, key) is not None)
        if key in self._running:
            remote += tuple(str(n) for n in self._running[key].parts)
        where = Whereabouts(
            key.model,
            host=(key.layout,) if here is not None and here.in_memory else (),
            disk=(key.layout,) if here is not None and not here.in_memory else (),
            remote=remote,
        )
        return (
            where.quickest(SourceRates(node.disk_bytes_s, node.link_bytes_s if node.disk_bytes_s else 0.0))
            is Tier.REMOTE
        )

    def _multicast(
        self,
        key: PackKey,
        group: Sequence[tuple[Activate, NodeId]],
        nodes: Mapping[NodeId, Node],
        layers: int,
        now_s: float,
    ) -> tuple[dict[NodeId, NodePlan], list[tuple[str, Distribute]], tuple[ExecutionPipeline, ...]]:
        """Each receiver's part, what the sources are sent, and the pipelines that receivers form meanwhile."""
        receivers = dict.fromkeys(node for _, node in group)
        running = self._running.get(key)
        if running is not None:
            return {node: self._joined(running, key, nodes[node], now_s) for node in receivers}, [], ()
        held = {n.id: p for n in nodes.values() if n.id not in receivers and (p := _pack(n, key)) is not None}
        if not held:
            return {}, [], ()
        orders = [order for order, _ in group]
        rates = self._rates(now_s)
        request = self._request(held, receivers, orders, layers, rates)
        chosen, pipelines = _planned(request, orders)
        session = uuid.uuid4().hex[:12]
        addresses = {str(n.id): n.weights for n in nodes.values()}
        blocks = chosen.schedule.blocks
        first, ends = first_blocks(request.first, blocks), end_blocks(request, blocks)
        name = window_name(key)
        topology, guessed = request.topology, not rates
        parts = node_plans(chosen, session, name, addresses, first=first, ends=ends, topology=topology, guessed=guessed)
        sent = sent_weights(orders[0].model, session, chosen)
        self._running[key] = _Running(
            sent, parts, {n: addresses[n] for n in parts}, now_s, set(map(str, receivers)), chosen.late
        )
        sends = [
            (nodes[NodeId(n)].mailbox, Distribute(part=msgspec.msgpack.encode(part)))
            for n, part in parts.items()
            if n not in self._running[key].receivers
        ]
        return {node: parts[str(node)] for node in receivers}, sends, pipelines

    def _request(
        self,
        held: Mapping[NodeId, PackReport],
        receivers: Iterable[NodeId],
        orders: Sequence[Activate],
        layers: int,
        rates: PairRates,
    ) -> PlanRequest:
        """With the links as the nodes' reports show them. Where any instance may serve before it has everything, all
        get first what is needed for that; with a pair's help, it uses what comes from the beginning on."""
        topology, own = split_by_topology(self._topology, rates)
        known = estimate_links(own)
        default = TEN_GIGABIT if known.typical is None else NodeLink(known.typical, known.typical)
        sources = sorted(held, key=lambda n: (not held[n].in_memory, n))
        nbytes = max(pack.nbytes for pack in held.values())
        live = any(order.live is not LiveMode.WHOLE for order in orders)
        shift = all(order.live is not LiveMode.PAIR for order in orders)
        first = tuple(held[sources[0]].first) if live else ()
        return PlanRequest(
            tuple(map(str, sources)),
            tuple(map(str, receivers)),
            nbytes,
            links=known.links,
            default_link=default,
            first=first,
            ends=tuple(held[sources[0]].ends) if shift and pipelined(orders) else (),
            layers=max(0, layers - 1) if first else 0,
            least_blocks=LIVE_BLOCKS if live else 1,
            shift=shift,
            topology=topology,
            sending=self._sending(),
        )

    def _sending(self) -> frozenset[str]:
        """Machines whose outgoing direction carries something: weights of a multicast that runs, or layers that run
        for instances of other machines, or in them."""
        busy = {node for running in self._running.values() for node, part in running.parts.items() if part.sends}
        for node in self._nodes.all():
            remotes = [instance.remote for instance in node.instances.values() if instance.remote is not None]
            others = {node_of(DeviceId(device)) for remote in remotes for device in (*remote.peers, *remote.leaders)}
            if others - {node.id}:
                busy.add(str(node.id))
        return frozenset(busy)

    def _rates(self, now_s: float) -> dict[tuple[str, str], float]:
        """What transfers reached lately, by (sending node, receiving node): a link that was slow is tried again some
        day."""
        rates: dict[tuple[str, str], float] = {}
        for node in self._nodes.all():
            for link in node.links:
                if link.age_s + now_s - node.seen_s <= LINK_KNOWN_S:
                    rates[link.source, str(node.id)] = link.bytes_s
        return rates

    def _joined(self, running: _Running, key: PackKey, node: Node, now_s: float) -> NodePlan:
        """A part for a machine that the plan does not foresee: it takes what it needs wherever it is."""
        near = self._topology.near(str(node.id))
        any_part = next(iter(running.parts.values()))
        running.seen_s = now_s
        running.addresses[str(node.id)] = node.weights
        running.receivers.add(str(node.id))
        return NodePlan(
            session=any_part.session,
            window=window_name(key),
            node=str(node.id),
            addresses=dict(running.addresses),
            sources=any_part.sources,
            pieces=any_part.pieces,
            piece_s=any_part.piece_s,
            guessed=any_part.guessed,
            near=tuple(n for n in running.addresses if n in near),
            first=max((part.first for part in running.parts.values()), key=len),
        )

    def _forget(self, now_s: float) -> None:
        """Multicasts that are over: every receiver has the pack, or none says that it still comes."""
        nodes = self._nodes.all()
        for key, running in list(self._running.items()):
            session = running.sent.session
            if any(a.session == session and a.took_s is None and not a.error for n in nodes for a in n.arriving):
                running.seen_s = now_s
            missing = [n for n in nodes if n.id in running.receivers and _pack(n, key) is None]
            if not missing or now_s - running.seen_s > RUNS_S:
                del self._running[key]


def _planned(request: PlanRequest, orders: Sequence[Activate]) -> tuple[Plan, tuple[ExecutionPipeline, ...]]:
    """The multicast to the machines of ``orders``, and the pipelines of those that are to form some."""
    if not (together := pipelined(orders)):
        return plan(request), ()
    found = plan_live(LiveRequest(request, free_devices=instances_per_node(together)))
    return found.multicast, found.pipelines


def _kind_of(order: Activate, node: Node) -> DeviceKind:
    return next((d.kind for d in node.devices if d.id in order.devices), DeviceKind.HOST)


def _pack(node: Node, key: PackKey) -> PackReport | None:
    return next((p for p in node.packs if p.model == key.model and p.layout == key.layout), None)
