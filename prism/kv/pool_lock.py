"""The lock of a machine's pool: of all its processes and their threads, gone with a process that dies."""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class PoolLock:
    """One process's descriptor of the lock's file, opened once: that takes five times as long as the lock itself."""

    def __init__(self, file: Path) -> None:
        """Raises ``OSError``."""
        self._file = file
        self._open()
        _locks.add(self)

    def _open(self) -> None:
        self._guard = threading.Lock()  # a file's lock is its descriptor's, which all threads have
        self._fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closing = weakref.finalize(self, os.close, self._fd)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Held within the context; only for short work."""
        with self._guard:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _forked(self) -> None:
        """In a child: the parent's descriptor would keep the lock when the parent dies with it in hand."""
        self._closing()
        self._open()


_locks: weakref.WeakSet[PoolLock] = weakref.WeakSet()


def _forked() -> None:
    for lock in list(_locks):
        lock._forked()


os.register_at_fork(after_in_child=_forked)
