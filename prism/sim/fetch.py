"""Weights that come to a node over the network or from its SSD: a few at a time, in order of asking."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from prism.sim.links import Flow, Link, Network


class Fetch:
    """One transfer, waiting or in progress."""

    __slots__ = ("flow", "nbytes", "path", "then")

    def __init__(self, path: tuple[Link, ...], nbytes: float, then: Callable[[], None]) -> None:
        self.path, self.nbytes, self.then = path, nbytes, then
        self.flow: Flow | None = None


class Fetcher:
    """Of one node."""

    def __init__(self, network: Network, at_once: int) -> None:
        self._network, self._at_once = network, at_once
        self._running = 0
        self._waiting: deque[Fetch] = deque()

    def fetch(self, path: tuple[Link, ...], nbytes: float, then: Callable[[], None]) -> Fetch:
        """Move ``nbytes`` over ``path`` when it is this transfer's turn, then call ``then``."""
        fetch = Fetch(path, nbytes, then)
        self._waiting.append(fetch)
        self._start()
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """Stop it; ``then`` is never called."""
        if fetch.flow is not None:
            self._network.cancel(fetch.flow)
            self._ended()
        elif fetch in self._waiting:
            self._waiting.remove(fetch)

    def _start(self) -> None:
        while self._waiting and self._running < self._at_once:
            fetch = self._waiting.popleft()
            self._running += 1

            def done(fetch: Fetch = fetch) -> None:
                self._ended()
                fetch.then()

            fetch.flow = self._network.start(dict.fromkeys(fetch.path, 1.0), fetch.nbytes, done)

    def _ended(self) -> None:
        self._running -= 1
        self._start()
