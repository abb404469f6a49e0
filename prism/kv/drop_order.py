"""In which order a full pool drops pieces: ranked together, dropped one by one as others come.

To look at every file of the pool takes as long as copying a megabyte for each eighty of them; so one look is used until
its pieces are gone, or for a while. Which of them were used since then is seen when their turn comes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from prism.policy.moving import StoredPiece, choose_dropped

_RANKED_S: Final = 5.0
"""So long an order holds: pieces that are dear to compute fall behind others as they grow old."""


class DropOrder:
    """Of pieces that were there at ``now_s``; what saves least is first."""

    def __init__(self, pieces: Sequence[StoredPiece] = (), now_s: float = 0.0) -> None:
        named = {piece.name: piece for piece in pieces}
        names = choose_dropped(pieces, sum(piece.nbytes for piece in pieces), now_s)
        self._left = {name: named[name] for name in names}
        self._ranked_s = now_s

    @property
    def is_worn(self) -> bool:
        """It is time for a new one."""
        return not self._left or not 0 <= time.time() - self._ranked_s < _RANKED_S

    def take(self, nbytes: int, within_bytes: int) -> StoredPiece | None:
        """The first piece of this size, if it is among the first ``within_bytes``; it is in the order no longer."""
        passed_bytes = 0
        for piece in self._left.values():
            if piece.nbytes == nbytes:
                return self._left.pop(piece.name)
            passed_bytes += piece.nbytes
            if passed_bytes >= within_bytes:
                break
        return None

    def first(self) -> StoredPiece | None:
        """The first one, whatever its size; it is in the order no longer. None: there are no more."""
        return self._left.pop(next(iter(self._left))) if self._left else None
