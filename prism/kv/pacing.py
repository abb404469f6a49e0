"""Copies kept to the declared rate of a link, so that a virtual device plays one (NVLink or PCIe) in real time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

_LEAST_NAP_S: Final = 2e-4
"""Shorter debts are carried to the next copy: a nap is no more exact than this."""


class LinkPace:
    """One link. Several threads share its rate."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
        nap: Callable[[float], None] = time.sleep,
    ) -> None:
        """``bytes_per_s`` 0: as fast as it goes."""
        self._bytes_per_s, self._clock, self._nap = bytes_per_s, clock, nap
        self._guard = threading.Lock()
        self._free_s = 0.0
        """When the link is free again."""

    def begin(self) -> float:
        """A copy begins now: for :meth:`copied`."""
        return self._clock()

    def copied(self, nbytes: int, began_s: float) -> None:
        """``nbytes`` have been copied since ``began_s``: returns when the link would have carried them."""
        if self._bytes_per_s <= 0:
            return
        with self._guard:
            self._free_s = max(self._free_s, began_s) + nbytes / self._bytes_per_s
            wait_s = self._free_s - self._clock()
        if wait_s > _LEAST_NAP_S:
            self._nap(wait_s)
