"""Who takes the KV of a machine that leaves: one machine for each model, told once and as long as it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prism.controller.nodes import FleetNodes, Node
from prism.controller.placement import PlacementBook
from prism.core.ids import ModelName, NodeId
from prism.core.instances import parts_by_node
from prism.core.views import InstanceState
from prism.wire.commands import BringKv, KvTakers
from prism.wire.message import Message
from prism.wire.messages import AgentReport


class KvTakerBook:
    """Asked about every report; :attr:`AgentReport.kv_held` says what is to be taken."""

    def __init__(self, placement: PlacementBook, fleet: FleetNodes) -> None:
        self._placement, self._fleet = placement, fleet
        self._told: dict[str, dict[str, NodeId]] = {}
        """By incarnation of who leaves: who takes what, by fingerprint of the weights."""
        self._fleet_known = False

    def fleet_known(self) -> None:
        """All machines have been heard of. Before that none is told that nobody can take something."""
        self._fleet_known = True

    def on_report(self, report: AgentReport, models: Mapping[str, ModelName]) -> Iterator[tuple[str, Message]]:
        """Mailboxes and messages: for those who take something from now on, and for the one that leaves. Whom that has
        given up is not named again for the same weights. ``models``: by fingerprint."""
        if not report.kv_held or report.left:
            return
        nodes = {node.id: node for node in self._fleet.all()}
        up = {node.incarnation for node in nodes.values()}
        self._told = {incarnation: told for incarnation, told in self._told.items() if incarnation in up}
        told = self._told.setdefault(report.incarnation, {})
        able = [node for id, node in nodes.items() if id != report.node and _can_take(node)]
        given: Counter[NodeId] = Counter()
        for mark, nbytes in sorted(report.kv_held.items(), key=lambda held: (-held[1], held[0])):
            may = [node for node in able if node.id not in report.kv_failed.get(mark, ())]
            taker = next((node for node in may if node.id == told.get(mark)), None)
            if taker is None and (taker := self._best(mark, models.get(mark), may, given)) is not None:
                told[mark] = taker.id
                peers = {report.node: report.weights}
                yield taker.mailbox, BringKv(model=models.get(mark, mark), mark=mark, peers=peers)
            if taker is None:
                told.pop(mark, None)
            else:
                given[taker.id] += nbytes
        takers = {mark: told.get(mark, "") for mark in report.kv_held if self._fleet_known or mark in told}
        yield report.mailbox, KvTakers(takers=takers)

    def _best(self, mark: str, model: ModelName | None, able: list[Node], given: Mapping[NodeId, int]) -> Node | None:
        """Where the model is, else where its weights are, else where there is most room beside what was ``given``."""
        serving = self._serving(model)

        def order(node: Node) -> tuple[bool, bool, float, str]:
            has_weights = any(pack.model == mark for pack in node.packs)
            return node.id not in serving, not has_weights, given.get(node.id, 0) / node.kv_bytes, node.id

        return min(able, key=order, default=None)

    def _serving(self, model: ModelName | None) -> set[NodeId]:
        replicas = [] if model is None else self._placement.replicas(model)
        return {id for r in replicas if r.state is not InstanceState.DRAINING for id in parts_by_node(r.parts)}


def _can_take(node: Node) -> bool:
    return bool(node.weights) and node.kv_bytes > 0 and not node.leaving
