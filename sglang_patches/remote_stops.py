"""Where the pieces of a route run: stops, and the peers at them as every rank of the leading engine knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from prism.remote.link import PeerLink

TOLD_BYTES: Final = 1 << 17
"""So many, at least, tell something of a link's rate."""


@dataclass(frozen=True, slots=True)
class KvRate:
    """How fast something comes over a link, as it was measured at the greeting and whenever KV came."""

    fixed_s: float
    """From a question until the beginning of its answer."""
    bytes_s: float

    def seen(self, nbytes: int, seconds: float) -> KvRate:
        """With an answer of ``nbytes`` that took so long; one that is too small tells nothing."""
        if nbytes < TOLD_BYTES:
            return self
        return KvRate(self.fixed_s, nbytes / max(seconds - self.fixed_s, seconds / 10, 1e-6))


class RoutePeer:
    """An engine that routes may lead over. Rank 0 has the link to it; that it is lost becomes known to all ranks
    between two steps, so that all of them go elsewhere at the same one."""

    def __init__(self, link: PeerLink | None) -> None:
        self._link = link
        self.name = ""
        """As it said when it was greeted."""
        self.rate = KvRate(0.0, 1.0)
        self.known: Any = None
        """The request table as it has it."""
        self.lost = False

    @property
    def link(self) -> PeerLink:
        """Rank 0's only."""
        assert self._link is not None, "other ranks speak to nobody"
        return self._link

    @property
    def closed(self) -> bool:
        """What rank 0 sees now, and no other rank yet."""
        return self.lost if self._link is None else self._link.closed

    @property
    def why(self) -> str:
        return "rank 0 lost it" if self._link is None else self._link.why

    def close(self, why: str) -> None:
        self.lost = True
        if self._link is not None:
            self._link.close(why)


@dataclass(frozen=True, slots=True)
class Stop:
    """Pieces [first, end) at ``peer``; None: here."""

    peer: RoutePeer | None
    first: int
    end: int
