"""Room in a machine's pool: who gets it, what is dropped for it, and whose file the next piece is written into.

A full pool writes a piece into the file of one that it drops, of the same size: to make a page of shared memory takes
the kernel four times as long as to write it. Such a file is locked first and loses its name then, so that it is a
complete piece or one that is being written at every moment, whenever its writer is killed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from prism.kv.drop_order import DropOrder
from prism.kv.machine_memory import SpareMemory
from prism.kv.pool_books import PoolBooks
from prism.kv.pool_directory import give_back
from prism.kv.pool_lock import PoolLock
from prism.policy.moving import StoredPiece
from prism.weights.store.locks import try_lock

_NEAR: Final = 8
"""A piece of the same size is dropped in place of others if it is in the first such part of the pool to go."""


class PoolRoom:
    """Of the pool at ``directory``; all methods take its lock, which is no thread's that calls them."""

    def __init__(self, directory: Path, bound_bytes: int, spare: SpareMemory | None) -> None:
        """Raises ``OSError`` where there is not even memory for the books."""
        self._directory, self.bound_bytes = directory, bound_bytes
        self.lock, self._order = PoolLock(directory / "lock"), DropOrder()
        with self.lock():
            self._books = PoolBooks(directory, bound_bytes, spare)

    def take_over(self, nbytes: int, part: str) -> int | None:
        """The file of a piece of ``nbytes`` that a full pool drops, as ``part``: its descriptor, which holds its lock;
        it is booked. None: there is room, or no such piece, or memory is short."""
        with self.lock():
            if self._books.missing_bytes(nbytes) <= 0 or self._books.missing_bytes(0) > 0:
                return None
            self._rank_anew()
            while self._books.missing_bytes(nbytes) > 0:
                piece = self._order.take(nbytes, self.bound_bytes // _NEAR)
                if piece is None:
                    return None
                if (fd := self._taken_over(piece, part)) is not None:
                    return fd
            return None

    def _taken_over(self, piece: StoredPiece, part: str) -> int | None:
        """None: it was used meanwhile, or is gone, or somebody reads it, and it is dropped."""
        path = f"{self._directory}/{piece.name}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(fd).st_mtime == piece.used_s:
                if try_lock(fd, exclusive=True):
                    os.rename(path, part)  # noqa: PTH104
                    taken, fd = fd, -1
                    return taken
                self._remove(Path(path))
        finally:
            if fd >= 0:
                os.close(fd)
        return None

    def book(self, nbytes: int, part: Path) -> bool:
        """Book what is to be written to ``part``, which is there and locked."""
        with self.lock():
            if nbytes <= self.bound_bytes:
                self._make(nbytes, part)
            if nbytes > self.bound_bytes or self._books.missing_bytes(nbytes) > 0:
                return False
            self._books.add(nbytes)
            return True

    def unbook(self, nbytes: int) -> None:
        """So much was booked and is gone."""
        with self.lock():
            self._books.gone(nbytes)

    def give_way(self) -> None:
        """Pieces whose memory the machine needs are dropped."""
        with self.lock():
            self._make(0)

    def drop(self, path: Path) -> None:
        """Remove a piece."""
        with self.lock():
            self._remove(path)

    def count(self) -> tuple[list[StoredPiece], int]:
        """All complete pieces, and the bytes that are booked. What dead writers left is removed."""
        with self.lock():
            return self._books.count(), self._books.booked_bytes

    def _make(self, nbytes: int, part: Path | None = None) -> None:
        """What saves least is dropped until ``nbytes`` fit; if the last order does not do, by a new count."""
        for again in (False, True):
            if self._books.missing_bytes(nbytes) > 0:
                self._rank_anew(part, again)
            missing = self._books.missing_bytes(nbytes)
            while missing > 0 and (piece := self._order.first()) is not None:
                missing -= self._remove(self._directory / piece.name, piece.used_s)
            if missing <= 0:
                return

    def _rank_anew(self, part: Path | None = None, again: bool = False) -> None:
        if again or self._order.is_worn:
            self._order = DropOrder(self._books.count(part), time.time())

    def _remove(self, path: Path, used_s: float | None = None) -> int:
        """``used_s``: not if it was used since then. Returns the bytes that are gone."""
        try:
            about = path.stat()
        except FileNotFoundError:
            return 0
        if used_s is not None and about.st_mtime != used_s:
            return 0
        give_back(path)
        self._books.gone(about.st_size)
        return about.st_size
