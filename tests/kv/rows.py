"""A pool's rows without a pool: plain arrays, one per column."""

from __future__ import annotations

import numpy as np

from prism.memory.rows import Packed, RowColumn, RowNumbers, SummedAfterwards


class ArrayRows(SummedAfterwards):
    """Rows of ``count`` tokens with columns of these widths; random bytes."""

    def __init__(self, widths: tuple[int, ...] = (48,), count: int = 1000, seed: int = 0) -> None:
        self.columns = tuple(RowColumn(0, width, width) for width in widths)
        made = np.random.default_rng(seed)
        self.data = [made.integers(0, 256, (count, width), dtype=np.uint8) for width in widths]

    def gather(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        packed[:] = self.data[column][rows].reshape(-1)

    def scatter(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        self.data[column][rows] = packed.reshape(len(rows), -1)

    def at(self, rows: RowNumbers) -> bytes:
        return b"".join(data[rows].tobytes() for data in self.data)
