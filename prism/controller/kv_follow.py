"""KV follows a model that moves: what an instance stored when it left is asked for by the machines that have the model.

An activation asks the other machines for KV at its beginning (:mod:`prism.kv.exchange`). Where the new instance comes
before the old one leaves, as when a device is emptied, there is nothing to be had yet. Where the machine itself leaves,
there is nothing to be had afterwards: it is told who takes what is there (:mod:`prism.controller.kv_takers`).
"""

from __future__ import annotations

from collections.abc import Callable

from prism.controller.kv_takers import KvTakerBook
from prism.controller.models import KnownModels
from prism.controller.nodes import FleetNodes
from prism.controller.placement import PlacementBook
from prism.core.ids import NodeId
from prism.core.instances import InstanceKey, parts_by_node
from prism.core.views import InstanceState
from prism.wire.commands import BringKv
from prism.wire.message import Message
from prism.wire.messages import AgentReport


class KvFollow:
    """The controller's part of it. ``send``: to a mailbox."""

    def __init__(
        self,
        models: KnownModels,
        placement: PlacementBook,
        fleet: FleetNodes,
        send: Callable[[str, Message], object],
    ) -> None:
        self._models, self._placement, self._fleet, self._send = models, placement, fleet, send
        self._takers = KvTakerBook(placement, fleet)

    def left(self, key: InstanceKey) -> None:
        """What the instance has stored follows to where its model is now."""
        mark = self._models.images(key.model).mark
        for mailbox, order in kv_orders(key, mark, self._placement, self._fleet):
            self._send(mailbox, order)

    def fleet_known(self) -> None:
        """As the event :class:`prism.core.events.FleetKnown`."""
        self._takers.fleet_known()

    def reported(self, report: AgentReport) -> None:
        """What a machine that leaves has stored goes to others; they and it are told."""
        for mailbox, message in self._takers.on_report(report, self._models.by_mark()):
            self._send(mailbox, message)


def kv_orders(left: InstanceKey, mark: str, placement: PlacementBook, fleet: FleetNodes) -> list[tuple[str, BringKv]]:
    """Mailboxes and messages for the machines of the model's other instances, now that ``left``, which ``placement``
    still has, is gone. ``mark``: fingerprint of its weights; "": its KV cannot be found by others."""
    nodes = {node.id: node for node in fleet.all()}
    holders = {
        str(id): nodes[id].weights
        for id in parts_by_node(placement.parts_of(left))
        if id in nodes and nodes[id].weights
    }
    if not mark or not holders:
        return []
    there: dict[NodeId, None] = {}
    for replica in placement.replicas(left.model):
        if replica.generation != left.generation and replica.state is not InstanceState.DRAINING:
            there |= dict.fromkeys(parts_by_node(replica.parts))
    return [
        (nodes[id].mailbox, BringKv(model=left.model, mark=mark, peers=holders))
        for id in there
        if id in nodes and str(id) not in holders
    ]
