"""How fast requests finish here, for an honest Retry-After."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_S: Final = 30.0


class Pace:
    """Finished requests per second over the last :data:`WINDOW_S`."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=10_000)

    def finished(self, now_s: float) -> None:
        self._ends.append(now_s)

    def rate(self, now_s: float) -> float:
        """Per second; 0 when nothing finished lately."""
        while self._ends and self._ends[0] < now_s - WINDOW_S:
            self._ends.popleft()
        if not self._ends:
            return 0.0
        return len(self._ends) / max(1.0, now_s - self._ends[0])

    def wait_s(self, waiting: int, excess: int, now_s: float) -> float:
        """Seconds until ``excess`` more of ``waiting`` requests have finished at the present rate, 1 to 120. Without a
        rate (nothing finished yet) it grows with the backlog."""
        rate = self.rate(now_s)
        if rate == 0.0:
            return min(120.0, max(5.0, waiting / 50))
        return min(120.0, max(1.0, excess / rate))
