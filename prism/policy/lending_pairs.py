"""Two servers dealt anew, exactly: the exchanges of any number of models for any that single ones do not reach
(see :mod:`prism.policy.lending_search`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from prism.policy.lending_map import Assignment, MemoryNeed, Servers, least_count

Floats = npt.NDArray[np.float64]
_MOST_MODELS: Final = 16
"""Of two servers together: every division of them is looked at, 65,536 at most. More models are dealt in part only."""
_LEAST_FALL: Final = 1e-9
_ABOVE: Final = 1e6
"""What one lender too many weighs: more than any server's memory squared."""


class PairSearch:
    """Deals two servers at a time anew until no two of them could be more even: the sum over servers of the squares of
    their net memory (in devices' memory) never grows, so that it ends.

    Net counts may differ, since only the largest is in the objective and the least possible one is known: what a server
    is above it counts before all memory. That leaves a wide lender with fewer borrowers beside it, whose bytes it could
    not cover.
    """

    def __init__(self, needs: Sequence[MemoryNeed], at: Assignment, servers: Servers) -> None:
        self._servers, self._most_count = servers, least_count(needs, servers)
        self._net = np.array([n.shards * n.spare_bytes / servers.gpu_bytes for n in needs])
        others = np.array([(n.shards, n.shards * n.sign) for n in needs], dtype=float)
        self._weights: Floats = np.stack([others[:, 0], self._net, others[:, 1]], axis=1)
        self._at = np.array(at)

    def run(self, most_divisions: int) -> Assignment:
        """Sweeps over all pairs, those first whose net memory differs most, until one changes nothing or about
        ``most_divisions`` were looked at."""
        left, changed = most_divisions, True
        while changed and left > 0:
            changed = False
            net = np.bincount(self._at, weights=self._net, minlength=self._servers.count)
            order = [int(server) for server in np.argsort(-net, kind="stable")]
            for first, second in ((a, b) for i, a in enumerate(order) for b in order[:i:-1]):
                looked, better = self._deal(first, second)
                left -= looked
                changed |= better
                if left <= 0:
                    break
        return [int(server) for server in self._at]

    def _deal(self, first: int, second: int) -> tuple[int, bool]:
        """The best division of the models of both: how many were looked at, and whether one is better than before."""
        here = np.flatnonzero((self._at == first) | (self._at == second))
        kept, free = here[_MOST_MODELS:], here[:_MOST_MODELS]
        chosen = _every_division(len(free))
        one = chosen @ self._weights[free] + self._weights[kept[self._at[kept] == first]].sum(axis=0)
        other = self._weights[here].sum(axis=0) - one
        fits = (one[:, 0] <= self._servers.gpus) & (other[:, 0] <= self._servers.gpus)
        squares = one[:, 1] ** 2 + other[:, 1] ** 2
        above = np.maximum(one[:, 2] - self._most_count, 0.0) + np.maximum(other[:, 2] - self._most_count, 0.0)
        squares += _ABOVE * above
        squares[~fits] = np.inf
        best = int(squares.argmin())
        now = int(((self._at[free] == first) << np.arange(len(free))).sum())
        better = bool(squares[best] < squares[now] - _LEAST_FALL)
        if better:
            self._at[free] = np.where(chosen[best] > 0, first, second)
        return len(chosen), better


_divisions: dict[int, Floats] = {}


def _every_division(models: int) -> Floats:
    """[2^models, models]: 1 where a model goes to the first of two servers; row i by the bits of i."""
    if models not in _divisions:
        _divisions[models] = ((np.arange(1 << models)[:, None] >> np.arange(models)) & 1).astype(float)
    return _divisions[models]
