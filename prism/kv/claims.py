"""Memory of the machine's pool that one process holds for itself: in the pool's books, never dropped to make room."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from prism.kv.piece_file import FileBytes
from prism.memory.rows import Packed


class ClaimedBytes:
    """A file of ``nbytes`` whose lock says that its process lives: a dead one's is removed by whoever next counts."""

    def __init__(self, fd: int, path: Path, nbytes: int, unbook: Callable[[Path, int], None]) -> None:
        self._fd, self._path, self.nbytes, self._unbook = fd, path, nbytes, unbook
        os.ftruncate(fd, nbytes)
        mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory: Packed = np.frombuffer(mapped, dtype=np.uint8)
        """To read what was written."""

    def write(self, data: Packed, offset: int) -> None:
        """Raises ``OSError`` when the machine has no memory for it after all: through the mapping that would be a
        signal."""
        FileBytes(self._fd).write(data, offset)

    def close(self) -> None:
        """Everything is free again."""
        if self._fd >= 0:
            self._unbook(self._path, self.nbytes)
            os.close(self._fd)
            self._fd = -1
            self.memory = np.empty(0, dtype=np.uint8)
