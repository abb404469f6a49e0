"""Filling a host copy from the pack on disk, leaf after leaf, each verified as it arrives. What an engine needs to lead
requests, whoever runs the layers (docs/live-scaling.md), comes first: embedding, first layer and head.

Several leaves are read at a time, past the page cache, so that checksums (and whoever uses what has arrived) overlap
the reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

from prism.weights.errors import BadPack
from prism.weights.packs.blocks import LAYER
from prism.weights.packs.disk_pack import DiskPack, open_pack
from prism.weights.packs.format import BlockEntry, PackHeader
from prism.weights.packs.leaf_sums import LeafSums
from prism.weights.store.host_copy import ABSENT, CORRUPT, HostCopy
from prism.weights.store.locks import try_lock

Turn = tuple[int, int]
"""Which of how many machines that load at the same time; each begins with another chunk."""
WHOLE_TURN: Final = (0, 1)
READERS: Final = 4
"""Reads in flight; disks need several to reach their rate."""


class FillLock:
    """Held by the one process that fills a copy. The kernel drops it when that process dies."""

    def __init__(self, copy_path: Path) -> None:
        self.path = copy_path.with_suffix(".fill")
        self._fd = -1

    def acquire(self) -> bool:
        """True if this process is now the filler (again)."""
        if self._fd >= 0:
            return True
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_lock(fd, exclusive=True):
            self._fd = fd
            return True
        os.close(fd)
        return False

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def fill_from_disk(copy: HostCopy, pack: Path, stop: threading.Event, turn: Turn = WHOLE_TURN) -> list[int]:
    """Reads every absent leaf of ``copy`` (writable) from ``pack``, :func:`lead_first`. Returns the leaves that are
    corrupt on disk. Ends early, between runs of leaves, when ``stop`` is set. Raises :class:`BadPack` if ``pack`` is
    another pack and ``OSError`` (ENOSPC) when memory is gone."""
    with open_pack(pack) as disk:
        header = disk.header
        if header.leaf_sums != copy.header.leaf_sums or header.blocks != copy.header.blocks:
            raise BadPack(pack, "is not the pack that the copy in memory was made from")
        absent = [leaf for leaf in lead_first(header, turn) if copy.arrival[leaf] == ABSENT]
        todo: Iterator[range] = iter(disk.runs(absent))
        guard = threading.Lock()

        def work() -> None:
            while not stop.is_set():
                with guard:
                    run = next(todo, None)
                if run is None:
                    return
                _fill_run(disk, copy, run)

        with ThreadPoolExecutor(READERS, thread_name_prefix="weights-fill") as pool:
            for future in [pool.submit(work) for _ in range(READERS)]:
                future.result()
    return [leaf for leaf in range(copy.header.leaves) if copy.arrival[leaf] == CORRUPT]


def lead_first(header: PackHeader, turn: Turn = WHOLE_TURN) -> list[int]:
    """All leaves: those with bytes of anything but layers after the first, and then the others, both in order; the
    others from the chunk of ``turn`` on, and around (lambda-Scale's shifted chunks, when several machines load at the
    same time)."""
    first = {leaf for b in _lead(header) for leaf in header.cut.holding(b.offset, b.offset + b.nbytes)}
    rest = [leaf for leaf in range(header.leaves) if leaf not in first]
    begin = len(rest) * turn[0] // turn[1]
    return [*sorted(first), *rest[begin:], *rest[:begin]]


def lead_parts(header: PackHeader) -> list[tuple[float, float]]:
    """Where these are, as fractions (from, to) of the data, in whole leaves: what is sent is cut where leaves end, and
    without the last leaf nobody begins."""
    count = max(header.cut.leaves, 1)
    held = [header.cut.holding(b.offset, b.offset + b.nbytes) for b in _lead(header)]
    return [(leaves.start / count, leaves.stop / count) for leaves in held]


def end_parts(header: PackHeader) -> list[tuple[float, float]]:
    """What of these has nothing but embedding and head: no layer ends or begins in a leaf of it."""
    cut = header.cut
    ends = [(b.offset, b.offset + b.nbytes) for b in header.blocks if not b.name.startswith(LAYER)]
    layers = [(b.offset, b.offset + b.nbytes) for b in header.blocks if b.name.startswith(LAYER)]
    shared = {leaf for begin, end in layers for leaf in cut.holding(begin, end)}
    alone = [[leaf for leaf in cut.holding(begin, end) if leaf not in shared] for begin, end in ends]
    return [(leaves[0] / cut.leaves, (leaves[-1] + 1) / cut.leaves) for leaves in alone if leaves]


def _lead(header: PackHeader) -> list[BlockEntry]:
    return [b for b in header.blocks if not b.name.startswith(LAYER) or b.name.partition(".")[0] == f"{LAYER}0"]


def _fill_run(disk: DiskPack, copy: HostCopy, run: range) -> None:
    sums = LeafSums(copy.header, run[0])
    for piece in disk.pieces(sums.position, copy.header.leaf_range(run[-1])[1]):
        copy.write(sums.position, piece)
        sums.feed(piece)
    for leaf, found in zip(run, sums.sums, strict=True):
        copy.note(leaf, found)


def refetch(
    copy: HostCopy, leaf: int, pack: Path | None, elsewhere: Callable[[PackHeader, int], bytes | None] | None
) -> bool:
    """Overwrites ``leaf`` of ``copy`` (writable) from the packed file, else with what ``elsewhere`` has, if the
    checksum of that is right; whether it was."""
    first, end = copy.header.leaf_range(leaf)
    if pack is not None and _read_again(copy, leaf, pack):
        return True
    data = elsewhere(copy.header, leaf) if elsewhere is not None else None
    return data is not None and len(data) == end - first and _put(copy, leaf, memoryview(data))


def _read_again(copy: HostCopy, leaf: int, pack: Path) -> bool:
    first, end = copy.header.leaf_range(leaf)
    try:
        with open_pack(pack) as disk:
            if disk.header.leaf_sums != copy.header.leaf_sums:
                return False
            data = memoryview(bytearray(end - first))
            disk.read(first, data)
    except (FileNotFoundError, BadPack):  # what is not there (any more) is asked for elsewhere
        return False
    return _put(copy, leaf, data)


def _put(copy: HostCopy, leaf: int, data: memoryview) -> bool:
    """Only what is right is written: somebody else may have brought the leaf meanwhile, and others use it."""
    if xxhash.xxh3_64_intdigest(data) != copy.header.leaf_sum(leaf):
        return False
    copy.write(copy.header.leaf_range(leaf)[0], data)
    return copy.mark(leaf)
