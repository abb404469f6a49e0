"""Which machines have which packs, kept up to date from what changed in their reports."""

from __future__ import annotations

from prism.core.ids import NodeId
from prism.weights.packs.format import RAW_LAYOUT
from prism.wire.reports import PackReport

Pack = tuple[str, str]
"""Fingerprint and layout."""


class ReportedPacks:
    """The packs of all machines that take part, by model."""

    def __init__(self) -> None:
        self._of: dict[NodeId, dict[Pack, PackReport]] = {}
        self._models: dict[str, dict[str, dict[NodeId, int]]] = {}
        """Fingerprint -> layout -> machine -> bytes."""

    @property
    def marks(self) -> frozenset[str]:
        """Fingerprints of everything that some machine has."""
        return frozenset(self._models)

    def set_packs(self, node: NodeId, packs: list[PackReport]) -> set[str]:
        """All packs of the machine; the fingerprints of which something changed."""
        before, now = self._of.get(node, {}), {(p.model, p.layout): p for p in packs}
        gone = [pack for pack, known in before.items() if now.get(pack) != known]
        come = [pack for pack, known in now.items() if before.get(pack) != known]
        for mark, layout in gone:
            holders = self._models[mark][layout]
            del holders[node]
            if not holders:
                del self._models[mark][layout]
            if not self._models[mark]:
                del self._models[mark]
        for pack in come:
            self._models.setdefault(pack[0], {}).setdefault(pack[1], {})[node] = now[pack].nbytes
        self._of[node] = now
        return {mark for mark, _ in (*gone, *come)}

    def drop(self, node: NodeId) -> set[str]:
        """The machine is gone; the fingerprints of what it had."""
        changed = self.set_packs(node, [])
        del self._of[node]
        return changed

    def wanted(self, mark: str) -> dict[str, int]:
        """Layout -> bytes of the packs that stand for the model: what engines left of it, or its files as they are
        where no engine has had it yet."""
        layouts = {layout: max(on.values()) for layout, on in self._models.get(mark, {}).items()}
        return {layout: n for layout, n in layouts.items() if layout != RAW_LAYOUT or len(layouts) == 1}

    def holders(self, mark: str, layout: str) -> frozenset[NodeId]:
        """Machines with the pack in memory or on disk."""
        return frozenset(self._models.get(mark, {}).get(layout, ()))

    def in_memory(self, node: NodeId) -> dict[Pack, int]:
        """Packs and bytes in the machine's host memory. Raises ``KeyError`` for one that takes no part."""
        return {pack: known.nbytes for pack, known in self._of[node].items() if known.in_memory}
