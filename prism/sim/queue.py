"""The event queue: alarms that can be moved or cleared, in order of time and, at the same time, of setting.

Moving an alarm leaves a dead entry in the heap that is skipped when it comes up, which is cheaper than removing it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Alarm:
    """Calls ``fn(arg)`` at the time it is set to; setting it again moves it."""

    __slots__ = ("_queue", "_ticket", "arg", "at_s", "fn")

    def __init__(self, queue: EventQueue, fn: Callable[[Any], None], arg: Any = None) -> None:
        self._queue, self.fn, self.arg = queue, fn, arg
        self._ticket = 0
        self.at_s: float | None = None

    def set(self, at_s: float) -> None:
        """Ring at ``at_s`` (now at the earliest) instead of any time set before."""
        if at_s == self.at_s:
            return
        self.at_s = at_s
        self._ticket = self._queue._push(at_s, self)

    def clear(self) -> None:
        """Do not ring."""
        self._ticket, self.at_s = 0, None


class EventQueue:
    """Owns the clock. ``now_s`` is the time of the alarm that rings."""

    __slots__ = ("_heap", "_tickets", "now_s", "rung")

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.rung = 0
        """Alarms that rang so far."""
        self._heap: list[tuple[float, int, Alarm]] = []
        self._tickets = 0

    def alarm(self, fn: Callable[[Any], None], arg: Any = None) -> Alarm:
        """A new alarm, not set."""
        return Alarm(self, fn, arg)

    def after(self, delay_s: float, fn: Callable[[Any], None], arg: Any = None) -> Alarm:
        """An alarm that rings once, ``delay_s`` from now."""
        alarm = Alarm(self, fn, arg)
        alarm.set(self.now_s + delay_s)
        return alarm

    def next_s(self) -> float | None:
        """Time of the next alarm; None when none is set."""
        heap = self._heap
        while heap:
            at_s, ticket, alarm = heap[0]
            if alarm._ticket == ticket:
                return at_s
            heappop(heap)
        return None

    def run_until(self, limit_s: float) -> None:
        """Ring every alarm up to and including ``limit_s``, then set the clock to ``limit_s`` (if finite)."""
        heap = self._heap
        while heap and heap[0][0] <= limit_s:
            at_s, ticket, alarm = heappop(heap)
            if alarm._ticket == ticket:
                self.now_s = at_s
                alarm._ticket, alarm.at_s = 0, None
                self.rung += 1
                alarm.fn(alarm.arg)
        if limit_s != float("inf"):
            self.now_s = max(self.now_s, limit_s)

    def _push(self, at_s: float, alarm: Alarm) -> int:
        self._tickets += 1
        heappush(self._heap, (max(at_s, self.now_s), self._tickets, alarm))
        return self._tickets
