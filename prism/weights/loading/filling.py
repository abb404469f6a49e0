"""Filling a lane's buffer from host memory."""

from __future__ import annotations

from typing import Protocol

import xxhash

from prism.memory import stream_copy
from prism.weights.packs.format import PackHeader


class HostBytes(Protocol):
    """A pack's data area in host memory."""

    @property
    def header(self) -> PackHeader: ...

    @property
    def data(self) -> memoryview: ...

    @property
    def address(self) -> int: ...


def fill(source: HostBytes, chunk: range, buffer: int) -> None:
    """Copies a chunk to address ``buffer``."""
    first, end = source.header.leaf_range(chunk[0])[0], source.header.leaf_range(chunk[-1])[1]
    stream_copy(buffer, source.address + first, end - first)


def checksum(source: HostBytes, leaf: int) -> int:
    """Of the leaf as it lies there now."""
    first, end = source.header.leaf_range(leaf)
    return xxhash.xxh3_64_intdigest(source.data[first:end])
