"""What a machine's pool holds, in one number that all its processes share, and the count of what is there.

Changed with the pool's lock held. Room is booked before bytes are written and given back after they are gone, so that
the books only ever count too much, and a count puts them right.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Final

from prism.kv.machine_memory import SpareMemory
from prism.kv.pool_directory import ABOUT, PART, is_written, note_of
from prism.policy.moving import StoredPiece

_WORD: Final = struct.Struct("<q")


class PoolBooks:
    """Of the pool at ``directory``, within ``bound_bytes`` and what the machine can spare."""

    def __init__(self, directory: Path, bound_bytes: int, spare: SpareMemory | None) -> None:
        """Raises ``OSError`` where there is not even memory for the books."""
        self._directory, self.bound_bytes, self._spare = directory, bound_bytes, spare
        fd = os.open(directory / "books", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _WORD.size)  # or a write to the mapping could be a signal
            self._word = mmap.mmap(fd, _WORD.size)
        finally:
            os.close(fd)

    @property
    def booked_bytes(self) -> int:
        return int(_WORD.unpack_from(self._word)[0])

    def _set(self, nbytes: int) -> None:
        _WORD.pack_into(self._word, 0, max(0, nbytes))

    def missing_bytes(self, nbytes: int) -> int:
        """What is to go before so much more fits; 0 or less: it does."""
        booked = self.booked_bytes
        bound = self.bound_bytes if self._spare is None else min(self.bound_bytes, booked + self._spare())
        return booked + nbytes - bound

    def add(self, nbytes: int) -> None:
        self._set(self.booked_bytes + nbytes)
        if self._spare is not None:
            self._spare.changed(-nbytes)

    def gone(self, nbytes: int) -> None:
        self._set(self.booked_bytes - nbytes)
        if self._spare is not None:
            self._spare.changed(nbytes)

    def count(self, unbooked: Path | None = None) -> list[StoredPiece]:
        """All complete pieces, by names as ``SPACE/PIECE``; what dead writers left is removed. The books then say what
        pieces and living writers hold, but for that of ``unbooked``."""
        pieces: list[StoredPiece] = []
        writing_bytes = 0
        for folder in self._directory.iterdir():
            if not folder.is_dir():
                continue
            space, cost = folder.name, note_of(folder).recompute_s_per_byte
            for entry in os.scandir(folder):
                if entry.name.startswith(PART):
                    path = Path(entry.path)
                    if path != unbooked and is_written(path):
                        writing_bytes += int(entry.name.rpartition("-")[2])
                elif entry.name != ABOUT:
                    info, name = entry.stat(), f"{space}/{entry.name}"
                    position = int(entry.name[:6], 16)
                    pieces.append(StoredPiece(name, info.st_size, info.st_mtime, info.st_size * cost, position))
        self._set(sum(p.nbytes for p in pieces) + writing_bytes)
        return pieces
