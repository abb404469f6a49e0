"""When a device is short of memory, and when the controller has to hear of it.

Only the device's own scheduler knows why requests wait: for memory, or for a place, a prefill or an engine. So it says
how long they have been waiting for memory in every report, and makes one as soon as that is more than they can bear: a
part of their objective, and no less than it takes a model to leave. What ends sooner ends by itself, when some request
finishes. The simulator's devices keep the same rules.
"""

from __future__ import annotations

from typing import Final

LEAVES_S: Final = 0.05
"""What it takes an idle model to leave."""
SLO_SHARE: Final = 0.25
"""So much of its TTFT objective a request may wait for memory before an idle neighbour has to go."""
_BREAK_S: Final = 0.1
"""A shorter break does not end a shortage: what came free went to the next one that waits."""
_AGAIN_S: Final = 0.25
"""Pause between two reports of this kind."""


def bearable_wait_s(slo_ttft_s: float) -> float:
    """How long a request with this objective can wait before something has to be done about it."""
    return max(LEAVES_S, SLO_SHARE * slo_ttft_s)


class Shortage:
    """Of one device. All times are ``now_s`` of one clock."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._last_s = float("-inf")
        """When memory was short for the last time."""
        self._bearable_s = 0.0
        self._told_s = float("-inf")
        self.is_short = False
        """Requests wait for memory, as far as is known."""

    def note_waiting(self, slo_s: float | None, now_s: float) -> None:
        """From now on requests wait for memory, the tightest TTFT objective among them being ``slo_s``; None: no
        request does."""
        if self.is_short:
            self._last_s = now_s
        self.is_short = slo_s is not None
        if slo_s is None:
            return
        if now_s - self._last_s > _BREAK_S or self._since_s is None:
            self._since_s = now_s
        self._last_s, self._bearable_s = now_s, bearable_wait_s(slo_s)

    def memory_came(self, now_s: float) -> None:
        """A model has left: what it held must be used before more is asked for."""
        if self._since_s is not None:
            self._since_s = now_s

    def age_s(self, now_s: float) -> float:
        """How long requests have been waiting for memory, when that is more than they can bear; else 0."""
        if self._since_s is None or not (self.is_short or now_s - self._last_s <= _BREAK_S):
            return 0.0
        return now_s - self._since_s if now_s >= self._since_s + self._bearable_s else 0.0

    def report_due_s(self) -> float:
        """When the controller is to be told of a shortage, should it last; infinite when there is none, or when it
        knows."""
        if self._since_s is None or not self.is_short or self._told_s >= self._since_s + self._bearable_s:
            return float("inf")
        return max(self._since_s + self._bearable_s, self._told_s + _AGAIN_S)

    def note_report(self, now_s: float) -> None:
        """A report was made."""
        self._told_s = now_s
