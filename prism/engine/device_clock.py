"""A virtual device's compute, as one resource: the engines on it take turns by a clock that they share.

::

    engine a  begin |== computes ==|.... sleeps ....| end
    engine b           begin |== computes ==|....... sleeps .......| end
    device          [    a's declared time    ][ b's declared time ]

Real compute may overlap, as it is small beside what is declared; where it is not, the step takes as long as it takes
and :attr:`DeviceClock.overrun_s` says so.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prism.core.pace import DevicePace, LayerWork

_WORD: Final = struct.Struct("<d")
_LONGEST_S: Final = 600.0
"""Nobody books so far ahead: a time beyond it is of a boot before this one."""


def clock_file(account_dir: Path, device: str) -> Path:
    """Where the engines of ``device`` (``host:0``) have its clock in common."""
    return account_dir / f"{device.replace(':', '-')}.clock"


class DeviceClock:
    """One process's view of a device's clock."""

    def __init__(
        self,
        pace: DevicePace,
        file: Path,
        clock: Callable[[], float] = time.perf_counter,
        nap: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock`` is the machine's, alike in all its processes."""
        self.pace, self._clock, self._nap = pace, clock, nap
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.paced_s = 0.0
        """Declared, of all that this process ran."""
        self.overrun_s = 0.0
        """Of that, by how much real compute went beyond its turn on the device."""

    def begin(self, work: LayerWork, shards: int = 1) -> float:
        """``work`` begins to be computed now; returns when the device is done with it, for :meth:`end`."""
        seconds = self.pace.seconds(work, shards)
        self.paced_s += seconds
        began_s = self._clock()
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            free_s: float = _WORD.unpack(os.pread(self._fd, _WORD.size, 0).ljust(_WORD.size, b"\0"))[0]
            if free_s > began_s + _LONGEST_S:
                free_s = began_s
            done_s = max(free_s, began_s) + seconds
            os.pwrite(self._fd, _WORD.pack(done_s), 0)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return done_s

    def end(self, done_s: float) -> None:
        """Its real compute is done: sleeps until the device is."""
        left_s = done_s - self._clock()
        if left_s > 0:
            self._nap(left_s)
        else:
            self.overrun_s -= left_s

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
