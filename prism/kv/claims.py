"""Memory of the machine's pool that one process holds for itself: in the pool's books, never dropped to make room."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prism.kv.piece_file import FileBytes
from prism.memory.rows import Packed


class ClaimedBytes:
    """Given back when its process dies, by whoever next counts."""

    def __init__(self, memory: Packed, fd: int, offset: int, give_back: Callable[[], None]) -> None:
        self._file, self._offset, self._give_back = FileBytes(fd), offset, give_back
        self.nbytes, self._open = len(memory), True
        self.memory = memory
        """To read what was written."""

    def write(self, data: Packed, offset: int) -> None:
        """Raises ``OSError`` when the machine has no memory for it after all: through the mapping that would be a
        signal."""
        self._file.write(data, self._offset + offset)

    def close(self) -> None:
        """Everything is free again."""
        if self._open:
            self._open = False
            self.memory = np.empty(0, dtype=np.uint8)
            self._give_back()
