"""Checksums of leaves from bytes that come in order, in pieces of any size."""

from __future__ import annotations

import xxhash

from prism.weights.packs.format import PackHeader


class LeafSums:
    """Takes the data area from the first byte of leaf ``first`` on. ``sums`` are those of the leaves that are full."""

    def __init__(self, header: PackHeader, first: int = 0) -> None:
        self._header, self._leaf = header, first
        self.position = header.leaf_range(first)[0]
        """Bytes of the data area up to here were taken."""
        self.sums: list[int] = []
        self._hash = xxhash.xxh3_64()

    def feed(self, view: memoryview) -> None:
        """The next bytes."""
        while view.nbytes:
            end = self._header.leaf_range(self._leaf)[1]
            part = view[: end - self.position]
            self._hash.update(part)
            self.position += part.nbytes
            view = view[part.nbytes :]
            if self.position == end:
                self.sums.append(self._hash.intdigest())
                self._hash.reset()
                self._leaf += 1
