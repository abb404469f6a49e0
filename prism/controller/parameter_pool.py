"""The fleet's parameter pool, carried out: from the agents' reports to orders for them.

Where copies belong is :mod:`prism.policy.live.parameter_pool`'s; here are the machines that can take part, from where a
copy comes, and what was ordered already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prism.controller.nodes import FleetNodes, Node
from prism.controller.reported_packs import Pack, ReportedPacks
from prism.core.ids import NodeId
from prism.obs import names
from prism.obs.metrics import Metrics
from prism.policy.live.parameter_pool import ParameterPool
from prism.wire.commands import CopyOrder, KeepCopies
from prism.wire.reports import PackReport

FETCHES: Final = 2
"""A machine brings so many packs into its memory at a time for the fleet: activations want its links, too."""
AGAIN_S: Final = 5.0
"""An order of which nothing is seen is given again after this time."""
REPEAT_S: Final = 10.0
"""An agent is told at least so often: it may have been restarted, or the message lost."""
SPARE_S: Final = 300.0
"""A further copy leaves when nobody has used it for so long."""


class FleetPool:
    """One per controller; reads ``nodes``, sends nothing. :meth:`look` every second."""

    def __init__(self, nodes: FleetNodes, metrics: Metrics) -> None:
        self._nodes, self._metrics = nodes, metrics
        self._book, self._packs = ParameterPool(), ReportedPacks()
        self._members: dict[NodeId, tuple[str, list[PackReport]]] = {}
        """Incarnation and packs, as the book has them."""
        self._models: Mapping[str, str] = {}
        self._entries: dict[str, dict[str, tuple[Pack, int]]] = {}
        """Fingerprint -> entry of the book -> pack and bytes."""
        self._keep: dict[NodeId, list[Pack]] = {}
        self._lacking: dict[str, list[str]] = {}
        """Machine -> entries that it is to fetch."""
        self._ordered_s: dict[tuple[str, str], float] = {}
        """By entry and machine: when that was ordered last."""
        self._told: dict[NodeId, tuple[KeepCopies, float]] = {}
        self.shown = False
        """Nothing has changed since somebody took the :meth:`view` and set this."""

    @property
    def packed(self) -> frozenset[str]:
        """Fingerprints of all packs that are reported."""
        return self._packs.marks

    def look(self, models: Mapping[str, str], now_s: float) -> list[tuple[str, KeepCopies]]:
        """Orders (mailbox, message), after what is reported. ``models``: fingerprint -> name of all models that are to
        have a copy. One machine alone is no fleet: nothing is ordered."""
        members = {n.id: n for n in self._nodes.all() if n.weights and n.host_bytes and not n.leaving}
        self._take_in(members, models)
        if self._book.settle():
            self._settled(members)
            self.shown = False
        if len(members) < 2:
            return []
        orders = [(node, self._order(node, members, now_s)) for node in members.values()]
        return [(node.mailbox, order) for node, order in orders if self._is_news(node, order, now_s)]

    def view(self) -> dict[str, Any]:
        """For operators: entries with their home and copies, and what each machine's memory holds."""
        entries = [
            {
                "model": self._models[mark],
                "fingerprint": mark,
                "layout": layout,
                "bytes": nbytes,
                "home": self._book.home_of(entry),
                "copies": sorted(self._book.holders(entry)),
            }
            for known in self._entries.values()
            for entry, ((mark, layout), nbytes) in known.items()
        ]
        machines = [
            {"node": n, "pool_bytes": self._book.load_bytes(n), "host_bytes": sum(self._packs.in_memory(n).values())}
            for n in sorted(self._members)
        ]
        return {"entries": sorted(entries, key=lambda e: (e["model"], e["layout"])), "machines": machines}

    # --- reports ---

    def _take_in(self, members: Mapping[NodeId, Node], models: Mapping[str, str]) -> None:
        changed: set[str] = set()
        if models != self._models:
            changed = {*models, *self._models}
            self._models = dict(models)
        for id, (incarnation, _) in list(self._members.items()):
            if id not in members or members[id].incarnation != incarnation:
                self._book.drop_machine(id)
                changed |= self._packs.drop(id)
                del self._members[id]
                self._told.pop(id, None)
        for id, node in members.items():
            self._book.put_machine(id, node.host_bytes)
            if self._members.get(id) != (node.incarnation, node.packs):
                changed |= self._packs.set_packs(id, node.packs)
                self._book.set_copies(id, {_entry(pack) for pack in self._packs.in_memory(id)})
                self._members[id] = (node.incarnation, node.packs)
        for mark in changed:
            self._needed(mark)

    def _needed(self, mark: str) -> None:
        """What of the model has to have a copy, after a change."""
        wanted = self._packs.wanted(mark) if mark in self._models else {}
        now = {_entry((mark, layout)): ((mark, layout), nbytes) for layout, nbytes in wanted.items()}
        for gone in self._entries.pop(mark, {}).keys() - now.keys():
            self._book.forget(gone)
        for entry, ((_, layout), nbytes) in now.items():
            self._book.need(entry, nbytes, frozenset(self._packs.holders(mark, layout)))
        if now:
            self._entries[mark] = now

    def _settled(self, members: Mapping[NodeId, Node]) -> None:
        self._keep = {id: sorted(_pack(entry) for entry in self._book.kept_on(id)) for id in members}
        lacking = self._book.lacking()
        self._lacking = {}
        for entry, home in sorted(lacking.items()):
            self._lacking.setdefault(home, []).append(entry)
        self._ordered_s = {key: at_s for key, at_s in self._ordered_s.items() if lacking.get(key[0]) == key[1]}
        homeless = sum(1 for _ in self._book.homeless())
        entries = sum(map(len, self._entries.values()))
        for state, count in {
            "home": entries - len(lacking) - homeless,
            "coming": len(lacking),
            "no_room": homeless,
        }.items():
            self._metrics.set(names.POOL_PACKS, count, state=state)
        for id in members:
            self._metrics.set(names.POOL_BYTES, self._book.load_bytes(id), node=id)
            self._metrics.set(names.HOST_WEIGHT_BYTES, sum(self._packs.in_memory(id).values()), node=id)

    # --- orders ---

    def _order(self, node: Node, members: Mapping[NodeId, Node], now_s: float) -> KeepCopies:
        lacking = self._lacking.get(node.id, [])
        due = [e for e in lacking if now_s - self._ordered_s.get((e, node.id), -AGAIN_S) >= AGAIN_S]
        due.sort(key=lambda e: self._ordered_s.get((e, node.id), -AGAIN_S))
        fetch = []
        for entry in due[: max(0, FETCHES - (len(lacking) - len(due)))]:
            self._ordered_s[entry, node.id] = now_s
            fetch += self._copy_order(_pack(entry), node, members)
        return KeepCopies(keep=self._keep[node.id], fetch=fetch, spare_s=SPARE_S)

    def _copy_order(self, pack: Pack, node: Node, members: Mapping[NodeId, Node]) -> list[CopyOrder]:
        """From another machine's memory, else from the own disk, else from another one's disk; of several machines from
        the one that answers for least. Nothing while nobody has it whole."""
        mark, layout = pack
        holders = self._packs.holders(mark, layout)
        in_memory = self._book.holders(_entry(pack)) & members.keys()
        others = in_memory or holders
        source: NodeId | None = None
        if in_memory or node.id not in holders:
            if not others:
                return []
            source = min((NodeId(n) for n in others), key=lambda n: (self._book.load_bytes(n), n))
        return [
            CopyOrder(
                mark=mark,
                layout=layout,
                nbytes=self._entries[mark][_entry(pack)][1],
                model=self._models[mark],
                source=source or "",
                address="" if source is None else members[source].weights,
            )
        ]

    def _is_news(self, node: Node, order: KeepCopies, now_s: float) -> bool:
        before = self._told.get(node.id)
        if before is not None and not order.fetch and order.keep == before[0].keep and now_s - before[1] < REPEAT_S:
            return False
        self._told[node.id] = (order, now_s)
        return True


def _entry(pack: Pack) -> str:
    """The book's name of a pack; fingerprints have no slash."""
    return "/".join(pack)


def _pack(entry: str) -> Pack:
    mark, _, layout = entry.partition("/")
    return mark, layout
