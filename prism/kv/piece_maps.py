"""Files of the machine's pool in this process's memory: mapped once, read and written as often as they come.

A file is known by its inode, since its name changes when its pages hold the next piece (:mod:`prism.kv.pool_room`).
Whoever touches its bytes holds a lock on it, so that nobody gives its pages back meanwhile; a mapping that stays behind
after they were given back has none and is not touched again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from typing import Final

import numpy as np

from prism.kv.piece_file import MemoryBytes
from prism.memory.rows import Packed

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MOST_FILES: Final = 4096
"""A process may have 65,530 mappings of all kinds."""


class PieceMaps:
    """One process's. Safe in several threads."""

    def __init__(self, most_files: int = _MOST_FILES) -> None:
        self._most_files, self._guard = most_files, threading.Lock()
        self._mapped: OrderedDict[tuple[int, int], Packed] = OrderedDict()
        """By device and inode, the one used last at the end."""

    def place(self, fd: int) -> MemoryBytes:
        """All bytes of the file. Its pages are there: writing to them takes no memory. Raises ``OSError``."""
        about = os.fstat(fd)
        with self._guard:
            mapped = self._mapped.pop((about.st_dev, about.st_ino), None)
            if mapped is None or len(mapped) != about.st_size:
                mapped = _map(fd, about.st_size)
            self._mapped[about.st_dev, about.st_ino] = mapped
            if len(self._mapped) > self._most_files:
                self._mapped.popitem(last=False)
        return MemoryBytes(mapped)

    def forget(self, fd: int) -> None:
        about = os.fstat(fd)
        with self._guard:
            self._mapped.pop((about.st_dev, about.st_ino), None)


def _map(fd: int, nbytes: int) -> Packed:
    """By a descriptor of its own, since a mapping keeps the locks of its file; Python's would also stay open."""
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    address = _libc.mmap(None, nbytes, protection, flags, own, 0)
    os.close(own)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(block), dtype=np.uint8)
