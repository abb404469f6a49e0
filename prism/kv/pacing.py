"""Copies kept to the declared rate of a link, so that a virtual device plays one (NVLink or PCIe) in real time."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_WORD: Final = struct.Struct("<d")
_LONGEST_S: Final = 60.0
"""Nobody books copies so far ahead."""
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
        wait_s = self.book(nbytes, began_s) - self._clock()
        if wait_s > _LEAST_NAP_S:
            self._nap(wait_s)

    def book(self, nbytes: int, began_s: float) -> float:
        """When the link has carried ``nbytes`` more that began at ``began_s``."""
        if self._bytes_per_s <= 0:
            return began_s
        with self._guard:
            self._free_s = max(self._free_s, began_s) + nbytes / self._bytes_per_s
            return self._free_s


class LenderPace(LinkPace):
    """The link to a lender, and the share of its memory's bandwidth that borrowers may take: of all their processes
    together, which book their copies in one file."""

    def __init__(
        self,
        bytes_per_s: float,
        lent_bytes_per_s: float,
        file: Path,
        clock: Callable[[], float] = time.perf_counter,
        nap: Callable[[float], None] = time.sleep,
    ) -> None:
        """``bytes_per_s`` is this borrower's link, ``lent_bytes_per_s`` what the lender gives to all; 0: as fast as it
        goes. Clocks of all processes are the machine's."""
        super().__init__(bytes_per_s, clock, nap)
        self._lent_bytes_per_s = lent_bytes_per_s
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if lent_bytes_per_s > 0 else -1

    def book(self, nbytes: int, began_s: float) -> float:
        free_s = super().book(nbytes, began_s)
        if self._fd < 0:
            return free_s
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            known_s: float = _WORD.unpack(os.pread(self._fd, _WORD.size, 0).ljust(_WORD.size, b"\0"))[0]
            if known_s > began_s + _LONGEST_S:
                known_s = began_s  # of a boot before this one
            lent_s = max(known_s, began_s) + nbytes / self._lent_bytes_per_s
            os.pwrite(self._fd, _WORD.pack(lent_s), 0)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return max(free_s, lent_s)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
