"""A pool of connections to other machines, filled ahead of need."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterable
from typing import Final

from prism.transfer.errors import PeerError
from prism.transfer.frames import Arrival
from prism.transfer.peer_connection import PeerConnection

ANSWER_S: Final = 0.02
"""Who has not said by then what it holds is left out, if others have: a slow node's link has a queue of its own."""


class PeerPool:
    """Connections by node, opened on demand or ahead of it. For one thread."""

    def __init__(self, addresses: dict[str, str], secret: bytes, me: str, dead_s: float) -> None:
        self.addresses, self._secret, self._me, self._dead_s = addresses, secret, me, dead_s
        self._open: dict[str, PeerConnection] = {}

    def get(self, node: str) -> PeerConnection:
        """The connection to ``node``. Raises ``OSError``, ``EOFError`` or :class:`PeerError` if there can be none."""
        peer = self._open.get(node)
        if peer is None:
            peer = self._open[node] = PeerConnection(node, self.addresses[node], self._secret, self._me, self._dead_s)
        return peer

    def known(self, node: str) -> bool:
        """Whether a connection to ``node`` is open."""
        return node in self._open

    def arrivals(self, nodes: Iterable[str], window: str) -> tuple[dict[str, Arrival], dict[str, str]]:
        """What ``nodes`` hold of a window, and why those that failed did. One that does not answer at once is not
        waited for while others have; its answer is taken the next time."""
        found: dict[str, Arrival] = {}
        failed: dict[str, str] = {}
        asked: dict[str, PeerConnection] = {}
        tardy: set[str] = set()
        for node in nodes:
            try:
                asked[node] = self.get(node)
                if asked[node].asked_s is not None:
                    tardy.add(node)
                asked[node].ask_arrival(window)
            except (OSError, EOFError, PeerError) as error:
                asked.pop(node, None)
                failed[node] = f"unreachable: {error}"
        until_s = time.monotonic() + ANSWER_S
        while asked and (not found or (asked.keys() - tardy and time.monotonic() < until_s)):
            left_s = max(until_s - time.monotonic(), 0.001)
            for peer in select.select(list(asked.values()), [], [], left_s)[0]:
                try:
                    found[peer.node] = peer.take_arrival()
                except (OSError, EOFError, PeerError) as error:
                    failed[peer.node] = f"unreachable: {error}"
                del asked[peer.node]
            now_s = time.monotonic()
            for node, peer in list(asked.items()):
                if now_s - (peer.asked_s or now_s) > self._dead_s:
                    failed[node] = "unreachable: does not answer"
                    del asked[node]
        return found, failed

    def drop(self, node: str) -> None:
        """Closes the connection, withdrawing what was asked on it."""
        peer = self._open.pop(node, None)
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.close()

    def close(self) -> None:
        for node in list(self._open):
            self.drop(node)
