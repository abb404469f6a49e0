"""When requests of a model have waited on a device for longer than they can bear, and when the controller hears of it.

A burst fills a device's queue within a fraction of a second; with the next report, a second later, others would load
too late. So the device says for every model how long its queue has not been empty, or what it takes to prefill if that
is longer, and makes a report as soon as this is more than its requests can bear, and again whenever the queue has
doubled. What nobody was told of yet is told almost at once, whatever was reported a moment ago: all that waited for a
model that was nowhere stands with its first instance when that has just said that it is there, and others that come
with it have nothing to do until it is known. The simulator's devices keep the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prism.core.ids import ModelName
from prism.scheduler.shortage import bearable_wait_s

_AGAIN_S: Final = 0.25
"""Pause between two reports of this kind of the same queue."""
_SOON_S: Final = 0.05
"""Of a queue that was empty, or could bear its wait, in the last report: a burst is here by then."""


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A model with waiting requests."""

    model: ModelName
    since_s: float
    """Since when there have been some without a break."""
    slo_ttft_s: float
    count: int
    work_s: float
    """What they take to prefill."""

    @property
    def due_s(self) -> float:
        """From then on they wait, or will, for longer than they can bear."""
        bearable_s = bearable_wait_s(self.slo_ttft_s)
        return self.since_s if self.work_s > bearable_s else self.since_s + bearable_s


class Backlog:
    """Of one device. All times are ``now_s`` of one clock."""

    def __init__(self) -> None:
        self._told: dict[ModelName, int] = {}
        """Requests that waited for each model when it was reported last, of those whose queue has not been empty
        since."""
        self._told_s = float("-inf")

    def report_due_s(self, lines: Iterable[WaitingLine]) -> float:
        """When the controller is to be told, should the queues stay as they are; infinite when it knows enough."""
        return min((self._line_due_s(x) for x in lines), default=float("inf"))

    def _line_due_s(self, line: WaitingLine) -> float:
        told = self._told.get(line.model, 0)
        if line.count < 2 * told:
            return float("inf")
        return max(line.due_s, self._told_s + (_AGAIN_S if told else _SOON_S))

    def note_report(self, lines: Iterable[WaitingLine], now_s: float) -> None:
        """A report was made. What could bear its wait so far is told again when it cannot any more."""
        self._told_s = now_s
        self._told = {x.model: x.count for x in lines if now_s >= x.due_s}
