"""Where a reception stands, and what its links reach."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reroute:
    """A transfer the plan foresaw and that was given up: why, and when (seconds after the start)."""

    piece: int
    source: str
    reason: str
    at_s: float


@dataclass(slots=True)
class ReceptionProgress:
    """Shown by ``prism ps`` and counted in the metrics."""

    bytes_all: int
    pieces_all: int
    bytes_done: int = 0
    pieces_done: int = 0
    by_source: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Bytes and seconds of whole pieces per sending node."""
    pieces_by_source: dict[str, int] = field(default_factory=dict)
    timed: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Bytes and seconds of transfer per sending node, those that were broken off for their slowness too: the rate of
    each link."""
    reroutes: list[Reroute] = field(default_factory=list)
    took_s: float | None = None
    """Set when the last piece arrived."""

    def add_piece(self, source: str, nbytes: int, took_s: float) -> None:
        """A piece is whole; ``nbytes`` of it came from ``source`` in ``took_s``."""
        had_bytes, had_s = self.by_source.get(source, (0, 0.0))
        self.by_source[source] = (had_bytes + nbytes, had_s + took_s)
        self.pieces_by_source[source] = self.pieces_by_source.get(source, 0) + 1
        self.add_timed(source, nbytes, took_s)

    def add_timed(self, source: str, nbytes: int, took_s: float) -> None:
        """``nbytes`` came from ``source`` in ``took_s``."""
        had_bytes, had_s = self.timed.get(source, (0, 0.0))
        self.timed[source] = (had_bytes + nbytes, had_s + took_s)
