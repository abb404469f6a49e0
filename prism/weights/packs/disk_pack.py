"""The disk tier's two kinds of pack behind one interface: with its own bytes, or an index into the model's files.

Reads are direct where the file system has direct I/O: the page cache is of no use for bytes that are read once.
"""

from __future__ import annotations

import bisect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from prism.weights.errors import BadPack
from prism.weights.packs.direct_buffers import direct_buffer
from prism.weights.packs.format import PAGE_BYTES, PREFIX, PackHeader, align, decode_prefix
from prism.weights.packs.index import INDEX_MAGIC, PackIndex, SourceFile, check_source, decode_index
from prism.weights.packs.leaf_sums import LeafSums
from prism.weights.packs.pack_files import read_header

MERGE_BYTES: Final = 64 << 10
"""Tensors that lie at most this far apart in their file are read at once."""
RUN_BYTES: Final = 8 << 20
"""Read at once: few large reads keep a disk busy although the threads that wait for them wake up late."""
WINDOW_BYTES: Final = RUN_BYTES + MERGE_BYTES


class DiskPack(ABC):
    """An open pack. ``read`` (of at most :data:`RUN_BYTES`) and ``leaf_sums`` may be called from several threads."""

    def __init__(self, header: PackHeader, where: Path) -> None:
        self.header, self.where = header, where
        self._fds: list[int] = []
        self._mine = threading.local()

    @abstractmethod
    def pieces(self, first: int, end: int) -> Iterator[memoryview]:
        """Bytes ``first .. end`` of the data area, unverified, in order; each piece is valid until the next is asked
        for. Raises :class:`BadPack` if a file ends too soon."""

    def read(self, first: int, into: memoryview) -> None:
        """Fills ``into`` with the data area from byte ``first`` on. Raises like :meth:`pieces`."""
        target = np.frombuffer(into, dtype=np.uint8)
        at = 0
        for piece in self.pieces(first, first + into.nbytes):
            target[at : at + piece.nbytes] = piece  # unlike memoryview's assignment this lets other threads run
            at += piece.nbytes

    def runs(self, leaves: Sequence[int]) -> list[range]:
        """``leaves``, in their order, as runs of neighbours that are read at once, of at most :data:`RUN_BYTES`."""
        most = max(1, RUN_BYTES // self.header.leaf_bytes)
        found: list[range] = []
        for leaf in leaves:
            if found and found[-1].stop == leaf and len(found[-1]) < most:
                found[-1] = range(found[-1].start, leaf + 1)
            else:
                found.append(range(leaf, leaf + 1))
        return found

    def leaf_sums(self, leaves: range) -> list[int]:
        """Checksums of a run of leaves as they are on disk now. Raises like :meth:`read`."""
        found = LeafSums(self.header, leaves[0])
        for piece in self.pieces(found.position, self.header.leaf_range(leaves[-1])[1]):
            found.feed(piece)
        return found.sums

    def _window(self, fd: int, start: int, end: int, where: Path) -> memoryview:
        """Bytes ``start .. end`` of a file through an aligned window, as direct reads demand; valid until the calling
        thread reads again."""
        aligned = start // PAGE_BYTES * PAGE_BYTES
        needed = align(end, PAGE_BYTES) - aligned
        buffer: memoryview | None = getattr(self._mine, "buffer", None)
        if buffer is None or buffer.nbytes < needed:
            buffer = self._mine.buffer = direct_buffer(max(needed, WINDOW_BYTES + 2 * PAGE_BYTES))
        _read(fd, buffer[:needed], aligned, end - aligned, where)
        return buffer[start - aligned : end - aligned]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> DiskPack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Contiguous(DiskPack):
    """A pack with its own bytes, in the order of the data area."""

    def __init__(self, path: Path) -> None:
        fd = open_direct(path)
        try:
            header, self._start = header_and_start(path)
        except BaseException:
            os.close(fd)
            raise
        super().__init__(header, path)
        self._fds.append(fd)

    def pieces(self, first: int, end: int) -> Iterator[memoryview]:
        yield self._window(self._fds[0], self._start + first, self._start + end, self.where)


@dataclass(frozen=True, slots=True)
class _Extent:
    """``nbytes`` of the data area from ``start`` on are those from ``offset`` of the file on."""

    start: int
    nbytes: int
    file: int
    offset: int


class Referenced(DiskPack):
    """A pack whose bytes are in the model's files; what lies between tensors in the data area is zero."""

    def __init__(self, index: PackIndex, where: Path) -> None:
        super().__init__(index.header, where)
        self._paths = index.paths
        blocks = index.header.blocks
        starts = [blocks[t.block].offset + t.offset for t in index.header.tensors]
        self._extents = sorted(
            (
                _Extent(start, t.nbytes, file, offset)
                for t, start, (file, offset) in zip(index.header.tensors, starts, index.places, strict=True)
                if t.nbytes
            ),
            key=lambda e: e.start,
        )
        self._ends = [e.start + e.nbytes for e in self._extents]
        try:
            for file, path in zip(index.files, self._paths, strict=True):
                self._open(index, file, path)
        except BaseException:
            self.close()
            raise

    def _open(self, index: PackIndex, file: SourceFile, path: Path) -> None:
        try:
            fd = open_direct(path)
        except FileNotFoundError:
            check_source(index, file, None, self.where)
            raise
        self._fds.append(fd)
        check_source(index, file, os.fstat(fd), self.where)

    def pieces(self, first: int, end: int) -> Iterator[memoryview]:
        at = first
        for extents in self._reads(first, end):
            file, base = extents[0].file, extents[0].offset
            stop = extents[-1].offset + extents[-1].nbytes
            window = self._window(self._fds[file], base, stop, self._paths[file])
            for e in extents:
                yield memoryview(bytes(e.start - at))
                yield window[e.offset - base : e.offset - base + e.nbytes]
                at = e.start + e.nbytes
        yield memoryview(bytes(end - at))

    def _reads(self, first: int, end: int) -> Iterator[list[_Extent]]:
        """What lies in bytes ``first .. end`` of the data area, cut to them; extents that are read at once together."""
        group: list[_Extent] = []
        for e in self._extents[bisect.bisect_right(self._ends, first) :]:
            if e.start >= end:
                break
            start, stop = max(e.start, first), min(e.start + e.nbytes, end)
            e = _Extent(start, stop - start, e.file, e.offset + start - e.start)
            if group and not self._together(group, e):
                yield group
                group = []
            group.append(e)
        if group:
            yield group

    def _together(self, group: list[_Extent], following: _Extent) -> bool:
        last = group[-1]
        gap = following.offset - (last.offset + last.nbytes)
        span = following.offset + following.nbytes - group[0].offset
        return last.file == following.file and 0 <= gap <= MERGE_BYTES and span <= WINDOW_BYTES


def _read(fd: int, into: memoryview, at: int, needed: int, where: Path) -> None:
    """Reads into ``into`` from byte ``at`` on, at least ``needed`` bytes. Raises :class:`BadPack` at the file's end."""
    done = 0
    while done < needed:
        got = os.preadv(fd, [into[done:]], at + done)
        if got == 0:
            raise BadPack(where, f"ends at byte {at + done}, inside its data")
        done += got


def open_pack(path: Path) -> DiskPack:
    """The pack at ``path``. Raises ``FileNotFoundError``, :class:`BadPack`, and :class:`StalePack` for an index whose
    files have changed."""
    index = read_index(path)
    return Contiguous(path) if index is None else Referenced(index, path)


def header_of(path: Path) -> PackHeader:
    """The header alone; the model's files that an index refers to are not looked at. Raises like :func:`open_pack`."""
    index = read_index(path)
    if index is not None:
        return index.header
    return header_and_start(path)[0]


def header_and_start(path: Path) -> tuple[PackHeader, int]:
    """Header and data offset of a pack with its own bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_header(fd, path)
    finally:
        os.close(fd)


def read_index(path: Path) -> PackIndex | None:
    """The index at ``path``, None for a pack with its own bytes. Raises ``FileNotFoundError`` and :class:`BadPack`."""
    with path.open("rb", buffering=0) as stream:
        prefix = stream.read(PREFIX.size) or b""
        if not prefix.startswith(INDEX_MAGIC):
            return None
        header_bytes, checksum = decode_prefix(prefix, path, INDEX_MAGIC)
        body = stream.read(header_bytes) or b""
    if len(body) != header_bytes:
        raise BadPack(path, f"ends inside its header ({len(body)} of {header_bytes} bytes)")
    return decode_index(body, checksum, path)


def open_direct(path: Path) -> int:
    """A descriptor for direct reads; an ordinary one where the file system has no direct I/O."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
