"""Pages of pieces that were dropped, kept for the next pieces of the same size: to make a page of shared memory takes
the kernel four times as long as to write it.

::

    DIRECTORY/free/NBYTES/N     a file of NBYTES whose content is nobody's; its time says since when

Every call is made with the pool's lock held. Who reads a piece holds a shared lock on its file, so that it becomes free
only when nobody reads it; who opened it before and locks it afterwards sees that its name is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prism.weights.store.locks import try_lock

FREE: Final = "free"


class FreeFiles:
    """Those of the pool at ``directory``, ``most_bytes`` in all."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = directory / FREE, most_bytes

    def total_bytes(self) -> int:
        """Counted on the disk."""
        return sum(nbytes for _, nbytes, _ in self._all())

    def keep(self, path: str, held_bytes: int) -> int | None:
        """Make the file of a piece free. ``held_bytes`` are held already. Returns how many it has; None: somebody reads
        it, or they are as many as may be held, or it is gone."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            about = os.fstat(fd)
            if held_bytes + about.st_size > self._most_bytes or not try_lock(fd, exclusive=True):
                return None
            folder = f"{self._folder}/{about.st_size}"
            os.makedirs(folder, 0o700, exist_ok=True)  # noqa: PTH103
            os.rename(path, f"{folder}/{about.st_ino}")  # noqa: PTH104
            os.utime(fd)
            return about.st_size
        finally:
            os.close(fd)

    def take(self, nbytes: int, part: str) -> int | None:
        """A free file of ``nbytes`` under the name ``part``: its descriptor, which holds its lock. None: there is
        none."""
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._folder}/{nbytes}") as entries:
            for entry in entries:
                fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if not try_lock(fd, exclusive=True):
                        continue
                    os.rename(entry.path, part)  # noqa: PTH104
                    taken, fd = fd, -1
                    return taken
                finally:
                    if fd >= 0:
                        os.close(fd)
        return None

    def give_back(self, nbytes: int) -> int:
        """At least so many bytes, or all there are, those that were free for longest first. Returns how many."""
        given = 0
        for _, size, path in sorted(self._all()):
            if given >= nbytes:
                break
            given += size if give_back(path) else 0
        return given

    def give_back_older(self, then_s: float) -> int:
        """What has been free since before ``then_s``."""
        return sum(size for since_s, size, path in self._all() if since_s < then_s and give_back(path))

    def _all(self) -> list[tuple[float, int, Path]]:
        found = []
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            for entry in os.scandir(folder):
                about = entry.stat()
                found.append((about.st_mtime, about.st_size, Path(entry.path)))
        return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def give_back(path: Path) -> bool:
    """Remove a file, and its pages at once, whoever has them mapped; where somebody holds a lock on it they go when
    that one has done. False: it was gone."""
    try:
        with _opened(path) as fd:
            if try_lock(fd, exclusive=True):
                os.ftruncate(fd, 0)
            path.unlink()
    except FileNotFoundError:
        return False
    return True


def give_back_tree(directory: Path) -> None:
    """Remove a pool: the files of its folders as :func:`give_back` does."""
    for folder in directory.glob("**/"):
        if folder != directory:
            for entry in os.scandir(folder):
                if entry.is_file():
                    give_back(Path(entry.path))
    shutil.rmtree(directory, ignore_errors=True)
