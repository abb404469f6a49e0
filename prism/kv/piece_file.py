"""A piece outside of an engine: its rows, packed, with a checksum per leaf; a file, or memory that a device lends.

::

    0       8            16           24                                  4096
    | magic | tokens u64 | leaves u64 | xxh3-64 of each leaf | zeros ...  | leaf 0 | leaf 1 | ...

A leaf is as many rows of one column (:mod:`prism.memory.rows`) as fit LEAF_BYTES. Where it is to lie in memory it is
gathered there, else in a small buffer from which it is written; it is scattered from where it lies. Both ways it is
summed in the same pass.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import xxhash

from prism.core.errors import PrismError
from prism.kv.pacing import LinkPace
from prism.memory.rows import Packed, PoolRows, RowNumbers, packed_bytes

MAGIC: Final = b"PRISMKV1"
HEADER_BYTES: Final = 4096
LEAF_BYTES: Final = 1 << 20
_HEAD: Final = struct.Struct("<8sQQ")
_MOST_LEAVES: Final = (HEADER_BYTES - _HEAD.size) // 8
"""Of a piece: 508 MiB of them."""
_KNOWN_CUTS: Final = 256
_UNPACED: Final = LinkPace(0.0)


class BadPiece(PrismError):
    """A piece is not what was stored: it is computed again."""


class PieceBytes(Protocol):
    """Where a piece lies."""

    def write(self, data: Packed, offset: int) -> None:
        """All of ``data``. Raises ``OSError``."""
        ...

    def room(self, offset: int, nbytes: int) -> Packed | None:
        """The memory where these bytes are to lie, to write them there; None: by :meth:`write`."""
        ...

    def view(self, offset: int, nbytes: int) -> Packed | None:
        """The bytes where they lie; None when there are fewer. A piece that is complete does not change."""
        ...


class FileBytes:
    """An open file that has no pages yet: where the machine has no memory for them that is an error of a write, and
    would be a signal through a mapping."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: Packed, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data.data[done:], offset + done)

    def room(self, offset: int, nbytes: int) -> None:
        return None

    def view(self, offset: int, nbytes: int) -> Packed | None:
        found = np.frombuffer(os.pread(self._fd, nbytes, offset), dtype=np.uint8)
        return found if len(found) == nbytes else None


class MemoryBytes:
    """Memory of this process."""

    def __init__(self, memory: Packed) -> None:
        self.memory = memory

    def write(self, data: Packed, offset: int) -> None:
        np.copyto(self.memory[offset : offset + len(data)], data)

    def room(self, offset: int, nbytes: int) -> Packed | None:
        return self.view(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> Packed | None:
        return self.memory[offset : offset + nbytes] if offset + nbytes <= len(self.memory) else None


@dataclass(frozen=True, slots=True)
class PieceLeaf:
    """Rows ``first .. end`` of a column, at ``offset`` of the file."""

    column: int
    first: int
    end: int
    offset: int
    nbytes: int


@functools.lru_cache(maxsize=_KNOWN_CUTS)
def piece_leaves(widths: tuple[int, ...], tokens: int) -> tuple[PieceLeaf, ...]:
    """How ``tokens`` rows of columns of these widths (bytes) are cut."""
    leaves: list[PieceLeaf] = []
    offset = HEADER_BYTES
    for column, width in enumerate(widths):
        step = max(1, LEAF_BYTES // width)
        for first in range(0, tokens, step):
            end = min(first + step, tokens)
            leaves.append(PieceLeaf(column, first, end, offset, (end - first) * width))
            offset += (end - first) * width
    return tuple(leaves)


def piece_bytes(widths: Sequence[int], tokens: int) -> int:
    """Size of the file."""
    return HEADER_BYTES + sum(widths) * tokens


class PieceStaging:
    """One buffer through which pieces go, for one thread."""

    def __init__(self) -> None:
        self._buffer = packed_bytes(LEAF_BYTES)

    def take(self, nbytes: int) -> Packed:
        if nbytes > len(self._buffer):
            self._buffer = packed_bytes(nbytes)
        return self._buffer[:nbytes]


def write_piece(
    place: PieceBytes, pool: PoolRows, rows: RowNumbers, staging: PieceStaging, pace: LinkPace = _UNPACED
) -> None:
    """Write ``rows`` of ``pool`` to ``place``. Raises ``OSError`` (``ENOSPC``), :class:`BadPiece` for a
    piece that has too many leaves."""
    leaves = piece_leaves(tuple([column.width for column in pool.columns]), len(rows))
    if len(leaves) > _MOST_LEAVES:
        raise BadPiece(f"a piece of {len(rows)} tokens has {len(leaves)} leaves, at most {_MOST_LEAVES} are summed")
    sums = []
    for leaf in leaves:
        began_s = pace.begin()
        room = place.room(leaf.offset, leaf.nbytes)
        packed = staging.take(leaf.nbytes) if room is None else room
        sums.append(pool.gather_summed(leaf.column, rows[leaf.first : leaf.end], packed))
        if room is None:
            place.write(packed, leaf.offset)
        pace.copied(leaf.nbytes, began_s)
    head = _HEAD.pack(MAGIC, len(rows), len(sums)) + struct.pack(f"<{len(sums)}Q", *sums)
    place.write(np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), dtype=np.uint8), 0)


def read_piece(place: PieceBytes, pool: PoolRows, rows: RowNumbers, skip: int, pace: LinkPace = _UNPACED) -> None:
    """Write the piece's rows from its ``skip``-th on to ``rows`` of ``pool``, each leaf summed as it is copied. Raises
    :class:`BadPiece`; rows may have been written then, and mean nothing."""
    tokens = skip + len(rows)
    leaves = piece_leaves(tuple([column.width for column in pool.columns]), tokens)
    for leaf, expected in zip(leaves, _read_sums(place, tokens, len(leaves)), strict=True):
        if leaf.end <= skip:
            continue
        began_s = pace.begin()
        packed = place.view(leaf.offset, leaf.nbytes)
        if packed is None or _put_back(packed, leaf, pool, rows, skip) != expected:
            raise BadPiece(f"bytes {leaf.offset}..{leaf.offset + leaf.nbytes} of a piece are not what was stored")
        pace.copied(leaf.nbytes, began_s)


def _put_back(packed: Packed, leaf: PieceLeaf, pool: PoolRows, rows: RowNumbers, skip: int) -> int:
    """Writes the leaf's rows from the piece's ``skip``-th on; returns the sum of all."""
    if leaf.first >= skip:
        return pool.scatter_summed(leaf.column, rows[leaf.first - skip : leaf.end - skip], packed)
    width = leaf.nbytes // (leaf.end - leaf.first)
    pool.scatter(leaf.column, rows[: leaf.end - skip], packed[(skip - leaf.first) * width :])
    return xxhash.xxh3_64_intdigest(packed.data)


def _read_sums(place: PieceBytes, tokens: int, leaves: int) -> tuple[int, ...]:
    head = place.view(0, HEADER_BYTES)
    if leaves > _MOST_LEAVES or head is None or _HEAD.unpack_from(head.data) != (MAGIC, tokens, leaves):
        raise BadPiece(f"the piece is not one of {tokens} tokens in {leaves} leaves")
    return struct.unpack_from(f"<{leaves}Q", head.data, _HEAD.size)
