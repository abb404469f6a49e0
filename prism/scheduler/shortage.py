"""When a device is short of memory, and when the controller has to hear of it.

Only the device's own scheduler knows why requests wait: for memory, or for a place, a prefill or an engine. So it says
how long they have been waiting for memory in every report, and a report is made as soon as that has lasted for a moment
(a model that leaves takes 50 ms; objectives are a few hundred). The simulator's devices keep the same rules.
"""

from __future__ import annotations

from typing import Final

LASTS_S: Final = 0.05
"""As long as it takes a model to leave. A shortage that is over sooner ended by itself: some request finished."""
_BREAK_S: Final = 0.1
"""A shorter break does not end a shortage: what came free went to the next one that waits."""
_AGAIN_S: Final = 0.25
"""Pause between two reports of this kind."""


class Shortage:
    """Of one device. All times are ``now_s`` of one clock."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._last_s = float("-inf")
        """When memory was short for the last time."""
        self._now_short = False
        self._told_s = float("-inf")

    def note(self, short: bool, now_s: float) -> None:
        """Whether something waits for memory from now on."""
        if self._now_short:
            self._last_s = now_s
        if short and (self._since_s is None or now_s - self._last_s > _BREAK_S):
            self._since_s = now_s
        self._now_short = short
        if short:
            self._last_s = now_s

    def memory_came(self, now_s: float) -> None:
        """A model has left: what it held must be used before more is asked for."""
        if self._since_s is not None:
            self._since_s = now_s

    def age_s(self, now_s: float) -> float:
        """How long something has been waiting for memory; 0 when nothing does."""
        if self._since_s is None or not (self._now_short or now_s - self._last_s <= _BREAK_S):
            return 0.0
        return now_s - self._since_s

    @property
    def lasts(self) -> bool:
        """Memory is short as far as is known."""
        return self._now_short

    def report_due_s(self) -> float:
        """When the controller is to be told of a shortage, should it last; infinite when there is none, or when it
        knows."""
        if self._since_s is None or not self._now_short or self._told_s >= self._since_s + LASTS_S:
            return float("inf")
        return max(self._since_s + LASTS_S, self._told_s + _AGAIN_S)

    def told(self, now_s: float) -> None:
        """A report was made."""
        self._told_s = now_s
