"""Weights that come to a node over the network or from its SSD: a few at a time, in order of asking. Who asks for what
is on its way already gets it with those that asked before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

from prism.sim.links import Flow, Link, Network


class Transfer:
    """Something on its way to a node, or waiting for its turn."""

    __slots__ = ("fetches", "flow", "nbytes", "path", "what")

    def __init__(self, path: tuple[Link, ...], nbytes: float, what: Hashable) -> None:
        self.path, self.nbytes, self.what = path, nbytes, what
        self.flow: Flow | None = None
        self.fetches: list[Fetch] = []


class Fetch:
    """What one asked for."""

    __slots__ = ("then", "transfer")

    def __init__(self, transfer: Transfer, then: Callable[[], None]) -> None:
        self.transfer, self.then = transfer, then
        transfer.fetches.append(self)

    @property
    def path(self) -> tuple[Link, ...]:
        return self.transfer.path

    def left_share(self, network: Network) -> float:
        """Part of it that has not arrived."""
        flow = self.transfer.flow
        return 1.0 if flow is None else network.left_bytes(flow) / self.transfer.nbytes


class Fetcher:
    """Of one node."""

    def __init__(self, network: Network, at_once: int) -> None:
        self._network, self._at_once = network, at_once
        self._running: dict[Hashable, Transfer] = {}
        self._waiting: deque[Transfer] = deque()

    def fetch(self, path: tuple[Link, ...], nbytes: float, then: Callable[[], None], what: Hashable = None) -> Fetch:
        """Move ``nbytes`` over ``path`` when it is this transfer's turn, then call ``then``. ``what`` comes once for
        all that ask while it does (None: nothing else is the same)."""
        what = object() if what is None else what
        known = self._running.get(what) or next((t for t in self._waiting if t.what == what), None)
        if known is not None:
            return Fetch(known, then)
        transfer = Transfer(path, nbytes, what)
        self._waiting.append(transfer)
        fetch = Fetch(transfer, then)
        self._start()
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """Its ``then`` is never called; what nobody wants any more stops."""
        transfer = fetch.transfer
        if fetch in transfer.fetches:
            transfer.fetches.remove(fetch)
        if transfer.fetches:
            return
        if transfer.flow is not None and self._running.get(transfer.what) is transfer:
            self._network.cancel(transfer.flow)
            self._ended(transfer)
        elif transfer in self._waiting:
            self._waiting.remove(transfer)

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            transfer = self._waiting.popleft()
            self._running[transfer.what] = transfer

            def done(transfer: Transfer = transfer) -> None:
                self._ended(transfer)
                for fetch in transfer.fetches:
                    fetch.then()

            transfer.flow = self._network.start(dict.fromkeys(transfer.path, 1.0), transfer.nbytes, done)

    def _ended(self, transfer: Transfer) -> None:
        del self._running[transfer.what]
        self._start()
