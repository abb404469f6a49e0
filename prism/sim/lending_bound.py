"""A bound below every assignment of AQUA's placement that knows what may stand beside models with several shards
(section 5; :mod:`prism.policy.lending_map` has the plain one, the mean).

Servers with the same wide models are of one *type*. A linear program deals out how many servers are of each type and
how many models of each kind stand on all servers of a type together; whatever the single servers get, their mean is
what the type got, and no largest is below a mean::

    for each type t:      sum of net memory on t     <=  level x servers(t)
                          sum of net counts on t     <=  count x servers(t)
                          devices used on t          <=  gpus  x servers(t)
                          wide models of a class on t =  as the type says x servers(t)

Every assignment whose servers keep to ``level`` and ``count`` is a solution, so that a level without one is below all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_array

from prism.policy.lending_map import MemoryNeed, Servers, least_count, least_imbalance_bytes

_MOST_TYPES: Final = 200
_HALVINGS: Final = 12
_Kind = tuple[int, int]
"""Shards and spare bytes of each."""
_Type = tuple[int, ...]
"""How many wide models of each class a server has."""


def bound_by_types(needs: Sequence[MemoryNeed], servers: Servers, enough_bytes: float) -> float:
    """The largest bound that is found, ``enough_bytes`` at most (the imbalance of an assignment that is known)."""
    plain = least_imbalance_bytes(needs, servers)
    types = list(_types(needs, servers))
    if len(types) > _MOST_TYPES or plain >= enough_bytes:
        return plain
    program = _Program(needs, servers, types)
    mean_bytes = sum(n.shards * n.spare_bytes for n in needs) / servers.count
    found = enough_bytes
    for count in range(least_count(needs, servers), servers.gpus + 1):
        weight = float(servers.gpu_bytes * count)
        if mean_bytes + weight >= found:
            break
        found = min(found, weight + program.least_level(count, mean_bytes, found - weight))
    return max(plain, found)


def _types(needs: Sequence[MemoryNeed], servers: Servers) -> Iterator[_Type]:
    """All that fit a server, none of them wide included."""
    classes = _classes(needs)

    def fill(index: int, left: int) -> Iterator[_Type]:
        if index == len(classes):
            yield ()
            return
        for many in range(left // classes[index][0] + 1):
            for rest in fill(index + 1, left - many * classes[index][0]):
                yield (many, *rest)

    return fill(0, servers.gpus)


def _classes(needs: Sequence[MemoryNeed]) -> list[tuple[int, int]]:
    """(shards, sign) of wide models."""
    return sorted({(n.shards, n.sign) for n in needs if n.shards > 1})


class _Program:
    """Variables: servers of each type, then models of each kind on each type (kind by kind)."""

    def __init__(self, needs: Sequence[MemoryNeed], servers: Servers, types: list[_Type]) -> None:
        self._servers, self._types = servers, types
        counted = Counter((n.shards, n.spare_bytes) for n in needs)
        self._kinds = list(counted)
        self._counted = np.array([counted[kind] for kind in self._kinds], dtype=float)
        self._classes = _classes(needs)
        self._equal, self._equals = self._equalities()

    def least_level(self, count: int, low_bytes: float, high_bytes: float) -> float:
        """A level that no assignment with ``count`` is below, by halving; ``high_bytes`` at most."""
        if not self._solvable(count, high_bytes):
            return high_bytes
        for _ in range(_HALVINGS):
            middle = (low_bytes + high_bytes) / 2
            low_bytes, high_bytes = (low_bytes, middle) if self._solvable(count, middle) else (middle, high_bytes)
        return low_bytes

    def _solvable(self, count: int, level_bytes: float) -> bool:
        level = level_bytes / self._servers.gpu_bytes
        types, kinds = len(self._types), self._kinds
        rows = lil_array((3 * types, types * (1 + len(kinds))))
        for t in range(types):
            rows[t, t], rows[types + t, t], rows[2 * types + t, t] = -level, -float(count), -float(self._servers.gpus)
            for k, (shards, spare_bytes) in enumerate(kinds):
                at = types + k * types + t
                rows[t, at] = shards * spare_bytes / self._servers.gpu_bytes
                rows[types + t, at] = shards * _sign(spare_bytes)
                rows[2 * types + t, at] = shards
        result = linprog(
            np.zeros(rows.shape[1]),
            A_ub=rows.tocsr(),
            b_ub=np.full(3 * types, 1e-9),
            A_eq=self._equal,
            b_eq=self._equals,
            method="highs",
        )
        return int(result.status) != _INFEASIBLE

    def _equalities(self) -> tuple[object, object]:
        types, classes = len(self._types), self._classes
        rows = lil_array((1 + len(self._kinds) + types * len(classes), types * (1 + len(self._kinds))))
        rows[0, :types] = 1.0
        for k, (shards, spare_bytes) in enumerate(self._kinds):
            first = types + k * types
            rows[1 + k, first : first + types] = 1.0
            if shards > 1:
                c = classes.index((shards, _sign(spare_bytes)))
                for t in range(types):
                    rows[1 + len(self._kinds) + t * len(classes) + c, first + t] = 1.0
        for t, many in enumerate(self._types):
            for c in range(len(classes)):
                rows[1 + len(self._kinds) + t * len(classes) + c, t] = -float(many[c])
        ends = np.concatenate([[float(self._servers.count)], self._counted, np.zeros(types * len(classes))])
        return rows.tocsr(), ends


_INFEASIBLE: Final = 2
"""HiGHS's status for it, as scipy passes it on."""


def _sign(spare_bytes: int) -> int:
    return (spare_bytes > 0) - (spare_bytes < 0)
