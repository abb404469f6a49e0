"""Links between memories: flows share them fairly, each direction is its own link.

A flow runs at one rate over all links of its path; on link ``l`` it takes ``share[l] * rate`` (a load that is split
over eight PCIe links takes an eighth of its rate on each). Rates are max-min fair. Every link has a *level*, the
highest rate it lets a flow have, such that the link is just full when each of its flows runs at the least level of its
path. When a flow comes or goes only the levels that really change are computed anew, link by link until nothing changes
(by more than :data:`SAME`), so that the cost does not grow with the fleet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from prism.sim.queue import Alarm, EventQueue

INFINITE: Final = float("inf")
SAME: Final = 5e-3
"""Relative difference below which a level counts as unchanged: rates are fair to within about this."""
_MOST_VISITS: Final = 64
"""Levels settle within a few visits of a link; this only bounds what rounding could do."""


class Link:
    """One direction of one link."""

    __slots__ = ("bytes_per_s", "flows", "level", "name")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.flows: dict[Flow, float] = {}
        """Flow -> share of its rate that it takes here."""
        self.level = INFINITE
        """Highest rate a flow may have here; infinite while the link limits nobody."""


class Flow:
    """A transfer in progress."""

    __slots__ = ("alarm", "left_bytes", "mark_s", "on_done", "path", "rate")

    def __init__(self, path: tuple[Link, ...], nbytes: float, on_done: Callable[[], None], alarm: Alarm) -> None:
        self.path = path
        self.left_bytes = float(nbytes)
        self.on_done = on_done
        self.alarm = alarm
        self.rate = 0.0
        """Bytes per second of the whole flow."""
        self.mark_s = 0.0


class Network:
    """All flows of a world."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    def start(self, shares: Mapping[Link, float], nbytes: float, on_done: Callable[[], None]) -> Flow:
        """Move ``nbytes`` over the links of ``shares`` (link -> part of the bytes that crosses it; not empty);
        ``on_done`` is called when the last byte is there."""
        flow = Flow(tuple(shares), nbytes, on_done, self._queue.alarm(self._finish))
        flow.alarm.arg = flow
        flow.mark_s = self._queue.now_s
        for link, share in shares.items():
            link.flows[flow] = share
        self._share(flow.path, flow)
        return flow

    def cancel(self, flow: Flow) -> float:
        """Stop ``flow``; its ``on_done`` is never called. Returns the bytes that have not arrived."""
        flow.alarm.clear()
        self._leave(flow)
        return self.left_bytes(flow)

    def left_bytes(self, flow: Flow) -> float:
        """What has not arrived yet."""
        return max(0.0, flow.left_bytes - (self._queue.now_s - flow.mark_s) * flow.rate)

    def link_changed(self, link: Link) -> None:
        """``link.bytes_per_s`` was changed."""
        self._share((link,))

    def _finish(self, flow: Flow) -> None:
        self._leave(flow)
        flow.on_done()

    def _leave(self, flow: Flow) -> None:
        for link in flow.path:
            del link.flows[flow]
        self._share(flow.path)

    def _share(self, around: Iterable[Link], new: Flow | None = None) -> None:
        """Bring levels and rates up to date after a change on the links ``around``."""
        touched = settle_levels(around)
        if new is not None:
            touched[new] = None
        now_s = self._queue.now_s
        for flow in touched:
            rate = min([link.level for link in flow.path])
            if rate != flow.rate:
                flow.left_bytes = max(0.0, flow.left_bytes - (now_s - flow.mark_s) * flow.rate)
                flow.mark_s, flow.rate = now_s, rate
                flow.alarm.set(now_s + flow.left_bytes / rate)


def settle_levels(around: Iterable[Link]) -> dict[Flow, None]:
    """Compute the levels of the links ``around`` and of all links that depend on them; returns the flows whose rate
    may have changed."""
    todo: deque[Link] = deque(around)
    queued = dict.fromkeys(todo)
    visits: dict[Link, int] = {}
    touched: dict[Flow, None] = {}
    while todo:
        link = todo.popleft()
        del queued[link]
        old, new = link.level, _level(link)
        if new == old or abs(new - old) <= SAME * min(new, old) or visits.get(link, 0) > _MOST_VISITS:
            continue
        link.level = new
        visits[link] = visits.get(link, 0) + 1
        low = min(old, new)
        for flow in link.flows:
            if _limit_elsewhere(flow, link) <= low:
                continue  # limited elsewhere before and after
            touched[flow] = None
            for other in flow.path:
                if other is not link and other not in queued:
                    queued[other] = None
                    todo.append(other)
    return touched


def _level(link: Link) -> float:
    """The level of ``link`` when each of its flows may run as fast as the rest of its path lets it."""
    flows = link.flows
    if not flows:
        return INFINITE
    limits = sorted([(_limit_elsewhere(flow, link), share) for flow, share in flows.items()])
    room, weight = link.bytes_per_s, sum(share for _, share in limits)
    for limit, share in limits:
        level = room / weight
        if limit > level:
            return level
        room -= limit * share
        weight -= share
    return INFINITE


def _limit_elsewhere(flow: Flow, link: Link) -> float:
    limit = INFINITE
    for other in flow.path:
        if other is not link and other.level < limit:
            limit = other.level
    return limit


def evenly(paths: Sequence[Sequence[Link]]) -> dict[Link, float]:
    """Shares of a flow that is split evenly over ``paths``."""
    shares: dict[Link, float] = {}
    for path in paths:
        for link in path:
            shares[link] = shares.get(link, 0.0) + 1.0 / len(paths)
    return shares
