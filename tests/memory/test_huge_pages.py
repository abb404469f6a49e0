"""Memory of virtual devices and of reserved files lies in the kernel's huge pages, where it has them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from prism import memory

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


@needs_them
def test_pages_that_are_made_together_are_huge_and_zero_whoever_had_them_before(tmp_path: Path) -> None:
    device = memory.open_device("host:0", 16 * HUGE, account_dir=tmp_path, page_bytes=HUGE)
    owner = device.register("a")
    owner.weight_region(HUGE // 2, page_bytes=HUGE // 2).commit()  # what lies behind it is at a border all the same
    region = owner.weight_region(6 * HUGE, page_bytes=2 * HUGE)
    for _ in range(2):
        region.commit()
        assert huge_bytes(region.address, region.address + 6 * HUGE) == 6 * HUGE
        assert not any(ctypes.string_at(region.address, 6 * HUGE))
        ctypes.memset(region.address, 0xAB, 6 * HUGE)
        assert not device.audit().problems
        region.decommit()
    assert not device.audit().problems


@needs_them
def test_files_in_memory_keep_what_is_written_in_them() -> None:
    file = os.memfd_create("file")
    try:
        os.pwrite(file, b"written", HUGE + 5)
        os.truncate(file, 3 * HUGE + 4096)
        assert memory.make_huge(file, 1, 3 * HUGE + 4096), "two whole ones"
        assert os.fstat(file).st_blocks * 512 == 2 * HUGE
        assert os.pread(file, 8, HUGE + 5) == b"written\0"
        assert not memory.make_huge(file, 0, HUGE - 1), "not one"
    finally:
        os.close(file)
