"""Open-loop sending: every request at its due time, however the server is doing.

Requests are prepared ahead of time in the pauses, so that at its due time a request is only written to a socket. The
loop's timers have a resolution of one millisecond; a request is never sent early.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Final

from prism.trace.replay.requests import Prepared

AHEAD_S: Final = 2.0
AHEAD_REQUESTS: Final = 20_000
AHEAD_BYTES: Final = 64 << 20
_SLICE_S: Final = 0.0005
"""Longest time of preparing between two looks at the clock and the sockets."""
_PAUSE_S: Final = 0.004


class Pacer:
    """Calls ``send(request)`` at ``zero_s + request.due_s`` on the clock of :func:`time.perf_counter`."""

    def __init__(self, requests: Iterator[Prepared], send: Callable[[Prepared], None]) -> None:
        self._requests, self._send = requests, send
        self._ready: deque[Prepared] = deque()
        self._bytes = 0
        self._zero_s = math.inf
        self._exhausted = self._stopped = False
        self.finished = asyncio.get_running_loop().create_future()
        """Done when the last request was sent (or sending was stopped), or with the error of a bad row."""

    def prefill(self) -> None:
        """Prepare the requests of the first seconds, however long it takes."""
        self._fill(math.inf)

    def start(self, zero_s: float) -> None:
        """Begin; ``zero_s`` should lie a little ahead."""
        self._zero_s = zero_s
        self._pump()
        self._refill()

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True
        if not self.finished.done():
            self.finished.set_result(None)

    def _pump(self) -> None:
        if self._stopped:
            return
        while True:
            if not self._ready:
                self._fill(_SLICE_S)
            if not self._ready:
                break
            wait_s = self._zero_s + self._ready[0].due_s - perf_counter()
            if wait_s > 0:
                asyncio.get_running_loop().call_later(math.ceil(wait_s * 1000) / 1000, self._pump)
                return
            request = self._ready.popleft()
            self._bytes -= len(request.data)
            self._send(request)
        if not self.finished.done():
            self.finished.set_result(None)

    def _refill(self) -> None:
        if self._exhausted or self._stopped:
            return
        self._fill(_SLICE_S)
        asyncio.get_running_loop().call_later(_PAUSE_S, self._refill)

    def _fill(self, budget_s: float) -> None:
        until_s = perf_counter() + budget_s
        horizon_s = max(0.0, perf_counter() - self._zero_s) + AHEAD_S
        while not self._exhausted and len(self._ready) < AHEAD_REQUESTS and self._bytes < AHEAD_BYTES:
            if self._ready and self._ready[-1].due_s > horizon_s:
                return
            try:
                request = next(self._requests, None)
            except Exception as exc:
                self._exhausted = self._stopped = True
                self.finished.set_exception(exc)
                return
            if request is None:
                self._exhausted = True
                return
            self._ready.append(request)
            self._bytes += len(request.data)
            if perf_counter() > until_s:
                return
