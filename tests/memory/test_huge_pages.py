"""Memory of virtual devices and of the pool of KV lies in the kernel's huge pages, where it has them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from prism import memory

HUGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE, which Python has no name for
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def kernel_has_them() -> bool:
    file = os.memfd_create("probe")
    try:
        os.truncate(file, 2 * HUGE)
        os.posix_fallocate(file, 0, 2 * HUGE)
        with mmap.mmap(file, 2 * HUGE) as mapped:
            address = ctypes.addressof(view := ctypes.c_char.from_buffer(mapped))
            found = _libc.madvise((address + HUGE - 1) // HUGE * HUGE, HUGE, COLLAPSE) == 0
            del view
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
def test_pages_of_a_virtual_device_are_huge_and_zero_whoever_had_them_before(tmp_path: Path) -> None:
    device = memory.open_device("host:0", 16 * HUGE, account_dir=tmp_path, page_bytes=HUGE)
    region = device.register("a").weight_region(6 * HUGE, page_bytes=2 * HUGE)
    for _ in range(2):
        region.commit()
        assert huge_bytes(region.address, region.address + 6 * HUGE) == 6 * HUGE
        assert not any(ctypes.string_at(region.address, 6 * HUGE))
        ctypes.memset(region.address, 0xAB, 6 * HUGE)
        assert not device.audit().problems
        region.decommit()
    assert not device.audit().problems


@needs_them
def test_pages_of_another_size_between_them_move_nobody_off_their_borders(tmp_path: Path) -> None:
    device = memory.open_device("host:0", 16 * HUGE, account_dir=tmp_path, page_bytes=HUGE)
    owner = device.register("a")
    odd = owner.weight_region(HUGE // 2, page_bytes=HUGE // 2)
    odd.commit()
    region = owner.weight_region(HUGE, page_bytes=HUGE)
    region.commit()
    assert huge_bytes(region.address, region.address + HUGE) == HUGE
