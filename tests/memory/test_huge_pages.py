"""Memory of virtual devices and of reserved files lies in the kernel's huge pages, where it has them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from prism import memory
from tests.memory.huge import HUGE, huge_bytes, needs_them


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
