"""Advisory locks on the store's files: the kernel drops them when their holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def try_lock(fd: int, exclusive: bool) -> bool:
    """Takes the advisory lock of ``fd`` without waiting; False when another process (or descriptor) has it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file ``path`` exclusively. Only for short work: others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def still_named(fd: int, path: Path) -> bool:
    """Whether ``path`` is still the file open at ``fd`` (it may have been reclaimed between open and lock)."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False
    then = os.fstat(fd)
    return (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)
