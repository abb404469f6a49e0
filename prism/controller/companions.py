"""Whom an instance that serves while its weights arrive can ask for layers: those that are there, and those that come
with it, dealt to execution pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from prism.controller.nodes import Node
from prism.core.effects import Activate
from prism.core.ids import DeviceId, NodeId
from prism.core.instances import InstanceKey, queue_device
from prism.core.settings import LiveMode
from prism.core.views import InstanceState
from prism.policy.live.pipelines import ExecutionPipeline, PipelineSeat
from prism.scheduler.beginnings import pipelined
from prism.wire.commands import Companion


@dataclass(frozen=True, slots=True)
class LiveCompany:
    """Of one instance (see :class:`prism.wire.commands.ActivateCommand`)."""

    companions: tuple[Companion, ...] = ()
    pipeline: int = 0
    turn: int = 0
    turns: int = 1
    leads: bool = True


@dataclass(frozen=True, slots=True)
class _PipelineTurn:
    pipeline: int
    turn: int
    turns: int


def company_of(
    orders: Sequence[Activate],
    planned: Sequence[ExecutionPipeline],
    nodes: Iterable[Node],
    late: Set[str] = frozenset(),
) -> dict[InstanceKey, LiveCompany]:
    """Of the ``orders``, all of one model and one decision. ``planned``: pipelines of those whose weights come over the
    network; the others, which load from their own memory or disk in shifted order, are one more (lambda-Scale's warm
    start; :func:`prism.policy.live.pipelines.plan_warm`). ``late``: machines to which embedding and head come late."""
    seats = _seats(pipelined(orders), planned)
    there = _there(orders, nodes)
    lead = {order.key: queue_device(order.parts) for order in orders}
    found: dict[InstanceKey, LiveCompany] = {}
    for order in orders:
        if order.live is LiveMode.WHOLE:
            continue
        coming = [
            Companion(key=o.key, device=lead[o.key], pipeline=seats[o.key].pipeline if o.key in seats else None)
            for o in orders
            if o.key != order.key and o.live is not LiveMode.WHOLE
        ]
        mine = seats.get(order.key, _PipelineTurn(0, 0, 1))
        leads = order.key not in seats or _node(order) not in late
        found[order.key] = LiveCompany((*coming, *there), mine.pipeline, mine.turn, mine.turns, leads)
    return found


def _seats(orders: Sequence[Activate], planned: Sequence[ExecutionPipeline]) -> dict[InstanceKey, _PipelineTurn]:
    """The t-th instance of a machine has the machine's t-th seat."""
    copies: dict[NodeId, list[InstanceKey]] = {}
    for order in orders:
        copies.setdefault(_node(order), []).append(order.key)
    of_seat = {PipelineSeat(node, copy): key for node, keys in copies.items() for copy, key in enumerate(keys)}
    seats: dict[InstanceKey, _PipelineTurn] = {}
    for number, pipeline in enumerate(planned):
        members = [of_seat[seat] for seat in pipeline.alone_s if seat in of_seat]
        seats |= {key: _PipelineTurn(number, turn, len(members)) for turn, key in enumerate(members)}
    warm = [order.key for order in orders if order.key not in seats]
    return seats | {key: _PipelineTurn(len(planned), turn, len(warm)) for turn, key in enumerate(warm)}


def _there(orders: Sequence[Activate], nodes: Iterable[Node]) -> list[Companion]:
    """Instances of the model that are there, or were ordered before."""
    ours = {order.key for order in orders}
    models = {order.model for order in orders}
    return [
        Companion(key=report.key, device=DeviceId(queue_device(report.parts)))
        for node in nodes
        for report in node.instances.values()
        if report.key.model in models
        and report.key not in ours
        and report.state in (InstanceState.LOADING, InstanceState.READY)
        and len(report.parts) == 1
    ]


def instances_per_node(orders: Iterable[Activate]) -> Mapping[str, int]:
    """How many of these instances each machine gets."""
    counts: dict[str, int] = {}
    for order in orders:
        counts[_node(order)] = counts.get(_node(order), 0) + 1
    return counts


def _node(order: Activate) -> NodeId:
    return order.parts[0].node
