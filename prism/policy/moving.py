"""KV that moves: move it or compute it again, and what a full pool drops. All by estimated time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """How KV gets to where it is needed."""

    MOVE = "move"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Leg:
    """One copy of a trip: ``nbytes`` over a link, and what the copy costs whatever its size."""

    nbytes: int
    bytes_per_s: float
    fixed_s: float = 0.0

    @property
    def estimated_s(self) -> float:
        return self.fixed_s + (self.nbytes / self.bytes_per_s if self.bytes_per_s > 0 else math.inf)


def lent_rate(link_bytes_per_s: float, lent_bytes_per_s: float) -> float:
    """Rate of copies to and from a lender over a link, of whose memory's bandwidth so much is for borrowers. 0 for one
    of them: it does not matter; for both: as fast as it goes."""
    return min((rate for rate in (link_bytes_per_s, lent_bytes_per_s) if rate > 0), default=0.0)


@dataclass(frozen=True, slots=True)
class WayChoice:
    """The faster way, and what both would take."""

    way: Way
    move_s: float
    recompute_s: float


def choose_way(trip: Sequence[Leg], tokens: int, prefill_tokens_per_s: float) -> WayChoice:
    """Move the KV of ``tokens`` over all legs of ``trip``, one after the other, or prefill them again: what takes less.

    Equal times recompute, which needs nobody's memory. A prefill rate of 0 is one that is not known to be any.
    """
    move_s = math.fsum(leg.estimated_s for leg in trip)
    recompute_s = tokens / prefill_tokens_per_s if prefill_tokens_per_s > 0 else (math.inf if tokens else 0.0)
    way = Way.MOVE if move_s < recompute_s else Way.RECOMPUTE
    return WayChoice(way, move_s, recompute_s)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """KV of some tokens that nobody is using."""

    name: str
    nbytes: int
    used_s: float
    """When it was last stored or hit."""
    recompute_s: float
    """What computing it again would take."""
    position: int
    """Its number in its sequence: of no use without those before it."""


def choose_dropped(pieces: Sequence[StoredPiece], needed_bytes: int, now_s: float) -> list[str]:
    """The names of pieces that free ``needed_bytes``, no more than needed; all if they are too small together.

    First those whose memory saves least: time of computing again per byte, over the time since it was used (a piece
    that was not used for long is taken to come that much more seldom). Alike, the later one in its sequence, since it
    is of no use without the earlier.
    """

    def saves(piece: StoredPiece) -> tuple[float, int, str]:
        age_s = max(now_s - piece.used_s, 1e-3)
        return piece.recompute_s / max(piece.nbytes, 1) / age_s, -piece.position, piece.name

    dropped: list[str] = []
    for piece in sorted(pieces, key=saves):
        if needed_bytes <= 0:
            break
        dropped.append(piece.name)
        needed_bytes -= piece.nbytes
    return dropped
