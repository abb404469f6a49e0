"""Which packs leave when a tier's budget is full: the least recently used that nobody holds, the fleet's own last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prism.weights.packs.format import PackKey


@dataclass(frozen=True, slots=True)
class ReclaimCandidate:
    key: PackKey
    nbytes: int
    used_s: float
    in_use: bool
    kept: bool = False
    """It is the fleet's copy (:mod:`prism.weights.store.kept`)."""


def choose_victims(packs: Sequence[ReclaimCandidate], needed_bytes: int, budget_bytes: int) -> list[PackKey] | None:
    """The packs to remove, oldest use first and kept ones last, so that ``needed_bytes`` fit into ``budget_bytes``;
    no more than needed. None if they do not fit even then."""
    excess = sum(p.nbytes for p in packs) + needed_bytes - budget_bytes
    victims: list[PackKey] = []
    for pack in sorted((p for p in packs if not p.in_use), key=lambda p: (p.kept, p.used_s, p.key)):
        if excess <= 0:
            break
        victims.append(pack.key)
        excess -= pack.nbytes
    return victims if excess <= 0 else None
