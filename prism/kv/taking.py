"""What a machine that hands its KV over hears of those who bring it: by fingerprint of the weights."""

from __future__ import annotations

import threading
import time


class TakerNews:
    """Written by the threads that answer and send, read by who waits (:mod:`prism.node.kv_handover`)."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._listed: set[tuple[str, str]] = set()
        self._heard_s: dict[str, float] = {}
        self.taken: dict[str, tuple[str, int]] = {}
        """Who has asked for all that it wants, and the bytes it has of it."""
        self.broken: dict[str, str] = {}
        """Who said last that it could not go on."""

    def begin(self) -> None:
        """Nothing more is stored from now on: what was listed before is not all there is."""
        with self._guard:
            self._listed.clear()
            self._heard_s.clear()
            self.taken.clear()
            self.broken.clear()

    def heard_s(self, mark: str) -> float:
        """When somebody asked for KV of these weights, or took some of it (the monotonic clock); 0: never."""
        return self._heard_s.get(mark, 0.0)

    def heard(self, *marks: str) -> None:
        self._heard_s |= dict.fromkeys(marks, time.monotonic())

    def listed(self, mark: str, node: str) -> None:
        """``node`` asked what there is."""
        with self._guard:
            self._listed.add((mark, node))
            if self.broken.get(mark) == node:
                del self.broken[mark]
        self.heard(mark)

    def took(self, mark: str, node: str, nbytes: int) -> None:
        """``node`` wants no more, and has so much; not one that does not know what was stored last."""
        self.heard(mark)
        with self._guard:
            if (mark, node) in self._listed:
                self.taken[mark] = node, nbytes

    def broke(self, mark: str, node: str) -> None:
        """``node`` lost its connection, or has no use for what came."""
        with self._guard:
            if (mark, node) in self._listed:
                self.broken[mark] = node
