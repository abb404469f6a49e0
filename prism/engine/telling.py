"""When an engine tells where it stands."""

from __future__ import annotations

from typing import Final

EVERY_S: Final = 0.05
IDLE_S: Final = 1.0
"""Even if nothing has changed."""


class LoadTelling:
    """Of one activation. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._told_s = 0.0
        self._pieces = 0

    def looks(self, now_s: float, pieces: int) -> bool:
        """Whether it is to be looked at now what there is to tell: every now and then, but others may wait for each of
        the ``pieces`` of the model that come."""
        came, self._pieces = pieces != self._pieces, pieces
        return came or now_s - self._told_s >= EVERY_S

    def tells(self, now_s: float, changed: bool) -> bool:
        """Whether what was found is told."""
        if not changed and now_s - self._told_s < IDLE_S:
            return False
        self._told_s = now_s
        return True
