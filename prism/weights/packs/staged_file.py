"""Writing a large file in order past the page cache.

Bytes that continue each other are gathered in one of two aligned buffers and written directly by a thread of their own,
while the caller goes on. The page cache would cost a copy and a fresh page per 4 KiB for data nobody reads back soon.
Whatever does not continue its predecessor (and what is left at the end) goes the ordinary way.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from prism.weights.packs.direct_buffers import direct_buffer
from prism.weights.packs.format import PAGE_BYTES

STAGE_BYTES: Final = 8 << 20


class StagedFile:
    """A new file of ``nbytes`` bytes. Not for several threads. Raises ``OSError`` (ENOSPC) when there is no room."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        """For ordinary reads and writes; they see what was written after :meth:`flush`."""
        self._direct = -1
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
            self._direct = _open_direct(path)
        except BaseException:
            self.close()
            raise
        self._stages = [direct_buffer(STAGE_BYTES) for _ in range(2)]
        self._pending: list[Future[None] | None] = [None, None]
        self._turn = 0
        self._at, self._filled = 0, 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights-write")

    def write(self, at: int, view: memoryview) -> None:
        """Writes ``view`` at byte ``at``."""
        if self._filled and at != self._at + self._filled:
            self.flush()
        if not self._filled:
            if self._direct < 0 or at % PAGE_BYTES:
                _write_all(self.fd, view, at)
                return
            self._at = at
        while view.nbytes:
            part = view[: STAGE_BYTES - self._filled]
            self._wait(self._turn)
            self._stages[self._turn][self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            view = view[part.nbytes :]
            if self._filled == STAGE_BYTES:
                self._launch()

    def _launch(self) -> None:
        stage = self._stages[self._turn]
        self._pending[self._turn] = self._pool.submit(_write_all, self._direct, stage, self._at)
        self._turn = 1 - self._turn
        self._at, self._filled = self._at + STAGE_BYTES, 0

    def flush(self) -> None:
        """Everything written so far is in the file. Raises what a write in the background raised."""
        for index in range(2):
            self._wait(index)
        if self._filled:
            _write_all(self.fd, self._stages[self._turn][: self._filled], self._at)
            self._at, self._filled = self._at + self._filled, 0

    def _wait(self, index: int) -> None:
        pending, self._pending[index] = self._pending[index], None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Harmless when closed already."""
        if self.fd < 0:
            return
        if hasattr(self, "_pool"):
            self._pool.shutdown()
        for fd in (self.fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self.fd = self._direct = -1


def _open_direct(path: Path) -> int:
    """-1 where the file system has no direct I/O."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1


def _write_all(fd: int, view: memoryview, at: int) -> None:
    done = 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], at + done)
