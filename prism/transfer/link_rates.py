"""What transfers from other nodes to this one reach, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

NOTED_BYTES: Final = 1 << 20
NOTED_S: Final = 0.2
"""Less of both says more about the start of a transfer than about a link."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """The rate at which bytes came from ``source``, ``age_s`` ago."""

    source: str
    bytes_s: float
    age_s: float


class LinkRates:
    """The newest rate per sending node. Not for several threads."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, float]] = {}

    def note_reception(self, timed: Mapping[str, tuple[int, float]], now_s: float) -> None:
        """Bytes and seconds per sending node of one reception (:class:`prism.transfer.progress.ReceptionProgress`)."""
        for source, (nbytes, took_s) in timed.items():
            if took_s > 0 and (nbytes >= NOTED_BYTES or took_s >= NOTED_S):
                self._newest[source] = max(nbytes, 1) / took_s, now_s

    def rates(self, now_s: float) -> list[LinkRate]:
        """By the sending node's name."""
        return [LinkRate(source, rate, now_s - at_s) for source, (rate, at_s) in sorted(self._newest.items())]
