"""Writing a pack: tensors in any order, checksums, then one atomic rename that makes it visible."""

from __future__ import annotations

import bisect
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

import msgspec
import xxhash

from prism.weights.errors import IncompletePack
from prism.weights.packs.format import PAGE_BYTES, PackHeader, encode_header
from prism.weights.packs.leaf_sums import LeafSums
from prism.weights.packs.staged_file import StagedFile

MAX_GAP_BYTES: Final = 2 * PAGE_BYTES
"""Padding between two tensors is less."""


class ReadableBuffer(Protocol):
    """Anything with the buffer protocol: bytes, memoryview, a contiguous numpy array."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class PackWriter:
    """Fills one pack. Several processes may write the same key at once: each has its own temporary file, the last
    :meth:`finish` wins, and readers see a whole pack or none.

    Bytes written in the order of the file are checksummed on the way; the rest is read back once in :meth:`finish`.
    ``published`` is called when the file is visible (a copy of an older pack may have to go). Not for several threads.
    """

    def __init__(self, path: Path, header: PackHeader, published: Callable[[], object] = lambda: None) -> None:
        self.path, self._header, self._published = path, header, published
        self._entries = {t.name: t for t in header.tensors}
        self._missing = {t.name for t in header.tensors if t.nbytes}
        places = [(header.blocks[t.block].offset + t.offset, t.nbytes) for t in header.tensors if t.nbytes]
        self._starts = sorted(start for start, _ in places)
        self._ends = sorted(start + nbytes for start, nbytes in places)
        self._start = len(encode_header(header))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            self._file = StagedFile(self._temporary, self._start + header.data_bytes)
        except OSError:
            self._temporary.unlink(missing_ok=True)
            raise
        self._leaves = LeafSums(header)

    @property
    def header(self) -> PackHeader:
        """Blocks and offsets; the checksums are zero until :meth:`finish`."""
        return self._header

    def write(self, name: str, data: ReadableBuffer | bytes, offset: int = 0) -> None:
        """Writes ``data`` into tensor ``name`` from byte ``offset`` on. A piece that reaches the tensor's end completes
        it. Raises ``KeyError`` for a tensor that is not in the plan and ``ValueError`` for bytes outside it."""
        entry = self._entries[name]
        view = memoryview(data).cast("B")
        if offset < 0 or offset + view.nbytes > entry.nbytes:
            raise ValueError(f"{name}: bytes {offset}..{offset + view.nbytes} of a tensor of {entry.nbytes}")
        at = self._header.blocks[entry.block].offset + entry.offset + offset
        gap = at - self._leaves.position
        if 0 < gap < MAX_GAP_BYTES and self._is_padding(self._leaves.position, at):
            # written out, so that the file has no break and its checksums go on
            self._put(self._leaves.position, memoryview(bytes(gap)))
        self._put(at, view)
        if offset + view.nbytes == entry.nbytes:
            self._missing.discard(name)

    def _is_padding(self, first: int, end: int) -> bool:
        """Whether no tensor lies in these bytes of the data area. One that does was written before, or comes later
        (buffers that a model keeps beside its layers): zeros in its place would be wrong or be summed as its bytes."""
        after = bisect.bisect_right(self._ends, first)
        return after == len(self._starts) or self._starts[after] >= end

    def _put(self, at: int, view: memoryview) -> None:
        self._file.write(self._start + at, view)
        if at == self._leaves.position:
            self._leaves.feed(view)

    def finish(self) -> PackHeader:
        """Checksums what is left, writes the header, makes the file durable and visible. Returns the final header.
        Raises :class:`IncompletePack` (nothing becomes visible) if a tensor has no bytes."""
        if self._missing:
            missing = sorted(self._missing)
            self.abort()
            raise IncompletePack(self.path, missing)
        self._file.flush()
        fd = self._file.fd
        found = self._leaves.sums
        for leaf in range(len(found), self._header.leaves):
            first, end = self._header.leaf_range(leaf)
            found.append(xxhash.xxh3_64_intdigest(os.pread(fd, end - first, self._start + first)))
        sums = b"".join(total.to_bytes(8, "little") for total in found)
        final = msgspec.structs.replace(self._header, leaf_sums=sums)
        os.pwrite(fd, encode_header(final), 0)
        os.fsync(fd)
        self._temporary.replace(self.path)
        self._published()
        self._file.close()
        return final

    def abort(self) -> None:
        """Forgets everything written; harmless after :meth:`finish`."""
        if self._file.fd >= 0:
            self._file.close()
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


def write_copy(header: PackHeader, data: memoryview, path: Path) -> None:
    """Writes a complete pack whose checksums are known; visible at ``path`` as a whole or not at all."""
    publish(path, encode_header(header), data)


def publish(path: Path, *parts: ReadableBuffer | bytes) -> None:
    """Writes a file that is durable and visible as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
