"""Which piece to take from whom once the plan has slipped: pure.

The sources' links are what a multicast is short of. So a source is asked for what nobody else has, and otherwise only
when the others have four times as much to do; and each node begins at another piece, so that what leaves the source
once is passed on between those that miss it. Nodes to which others find it slow to send are asked last, and take
themselves what many have: the first copy of a piece is for those who pass it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SOURCE_PENALTY: Final = 4
SLOW_PENALTY: Final = 12
PLANNED_BONUS: Final = 2
QUEUED: Final = 2
"""So many pulls may wait at a source without its counting as busy: its link shall never idle."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node has of the pieces that are wanted, and how many pulls wait for its link."""

    node: str
    pieces: frozenset[int]
    waiting: int
    source: bool = False


def choose_piece(
    wanted: Sequence[int],
    offers: Iterable[Offer],
    turn: int,
    slow: Collection[str] = (),
    slow_myself: bool = False,
    planned: Mapping[int, str] = MappingProxyType({}),
) -> tuple[str, int] | None:
    """(node, piece) to pull next; None when nothing that is wanted is offered. ``turn`` differs from node to node,
    ``slow`` are nodes that others say are slow, ``planned`` from whom each piece comes by the plan, which sends
    different nodes to different places."""
    offers = list(offers)
    holders = Counter(piece for offer in offers if offer.node not in slow for piece in offer.pieces)
    passed_on = {piece for offer in offers if offer.node not in slow and not offer.source for piece in offer.pieces}
    best: tuple[tuple[int, int, int, str], int] | None = None
    count = max(len(wanted), 1)
    for offer in offers:
        for place, piece in enumerate(wanted):
            if piece not in offer.pieces:
                continue
            spared = offer.source and (piece in passed_on or slow_myself)
            cost = max(offer.waiting - (QUEUED if offer.source else 0), 0)
            cost -= PLANNED_BONUS * (planned.get(piece) == offer.node)
            cost += SOURCE_PENALTY * spared + SLOW_PENALTY * (offer.node in slow)
            rarity = -holders[piece] if slow_myself else holders[piece]
            key = (cost, rarity, (place + turn) % count, offer.node)
            if best is None or key < best[0]:
                best = key, piece
    return None if best is None else (best[0][3], best[1])
