"""Copies of weights in the memory of the nodes: who has which model, and which copy makes room for another."""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.ids import ModelName, NodeId


class HostCache:
    """Host memory for weights over all nodes. A node's own share of the catalog (*home* copies) stays; others are
    forgotten, least recently used first."""

    def __init__(self) -> None:
        self._room: dict[NodeId, int] = {}
        self._guests: dict[NodeId, dict[ModelName, int]] = {}
        self._homes: dict[ModelName, dict[NodeId, None]] = {}
        self._everywhere = False

    def fill_everywhere(self) -> None:
        """Every node holds every model, whatever its size (the paper's set-up)."""
        self._everywhere = True

    def add_node(self, node: NodeId, memory_bytes: int) -> None:
        self._room.setdefault(node, memory_bytes)
        self._guests.setdefault(node, {})

    def remove_node(self, node: NodeId) -> None:
        self._room.pop(node, None)
        self._guests.pop(node, None)
        for homes in self._homes.values():
            homes.pop(node, None)

    def spread(self, models: Iterable[tuple[ModelName, int]]) -> None:
        """One home copy of each ``(model, bytes)``, on the node with most room (the largest models first)."""
        for model, nbytes in sorted(models, key=lambda m: (-m[1], m[0])):
            node = max(self._room, key=lambda n: self._room[n])
            if nbytes <= self._room[node]:
                self._room[node] -= nbytes
                self._homes[model] = {node: None}

    def has(self, node: NodeId, model: ModelName) -> bool:
        if self._everywhere or node in self._homes.get(model, ()):
            return True
        guests = self._guests.get(node, {})
        if model not in guests:
            return False
        guests[model] = guests.pop(model)  # used now
        return True

    def holders(self, model: ModelName) -> list[NodeId]:
        """All nodes whose copies others may read, those first that stay. Empty: only
        storage has the model."""
        guests = [node for node, models in self._guests.items() if model in models]
        return [*self._homes.get(model, ()), *guests]

    def keep(self, node: NodeId, model: ModelName, nbytes: int) -> None:
        """``model`` has just come through the memory of ``node``: keep it if that is possible."""
        if self._everywhere or node not in self._room or self.has(node, model):
            return
        guests = self._guests[node]
        while guests and sum(guests.values()) + nbytes > self._room[node]:
            del guests[next(iter(guests))]
        if nbytes <= self._room[node]:
            guests[model] = nbytes
