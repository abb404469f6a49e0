"""Whether this kernel has huge pages for files in memory, and how many of a process's it has mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

HUGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE, which Python has no name for
FIXED = 0x10  # MAP_FIXED, likewise
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def kernel_has_them() -> bool:
    file = os.memfd_create("probe")
    try:
        os.posix_fallocate(file, 0, HUGE)
        with mmap.mmap(-1, 2 * HUGE) as room:
            start = ctypes.addressof(kept := ctypes.c_char.from_buffer(room))
            border = (start + HUGE - 1) // HUGE * HUGE
            found = _libc.mmap(border, HUGE, mmap.PROT_WRITE, mmap.MAP_SHARED | FIXED, file, 0) == border
            found = found and _libc.madvise(border, HUGE, COLLAPSE) == 0
            del kept
            return found
    finally:
        os.close(file)


def huge_bytes(first: int, last: int) -> int:
    """Of this process's addresses from ``first`` to ``last``: bytes of files that are mapped in huge pages."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (word := line.split()[0]) and not word.endswith(":"):
            start, end = (int(part, 16) for part in word.split("-"))
            inside = first < end and start < last
        elif inside and word == "ShmemPmdMapped:":
            found += int(line.split()[1]) << 10
    return found


needs_them = pytest.mark.skipif(not kernel_has_them(), reason="this kernel has no huge pages for files in memory")
