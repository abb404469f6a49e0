"""The KV of some tokens as packed bytes, and back into other rows: what every move of KV is made of.

A pool tells where its rows lie (:func:`~prism.memory.tensors.row_views`), whatever is in them: heads, latents, one
layer's or all layers'. Neighbours are joined into *columns*, so that token-major pools have one and a row is one copy::

    column 0        column 1                 packed:  | column 0: row a, row b, ... | column 1: row a, row b, ... |
    | row 0 | ...   | row 0 | ...
    | row 1 | ...   | row 1 | ...

A row is a token, by the number that engines use (slot * tokens_per_slot + place in the slot). Rows must be in use:
others may have no memory behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from prism.memory import _kvcached
from prism.memory._kvcached import Pool
from prism.memory.tensors import row_views

RowNumbers = npt.NDArray[np.int64]
Packed = npt.NDArray[np.uint8]
"""Contiguous bytes of host memory."""

_CACHED_BYTES: Final = 512 << 10
"""What is longer is not still in the caches when it is read next."""
_LEAST_SUMMED_BYTES: Final = 241
"""What is shorter is summed in another way."""


_LINE_BYTES: Final = 64


def packed_bytes(nbytes: int) -> Packed:
    """Memory for packed bytes, of any content, that begins with a line of the processor's caches: rows are then written
    in whole lines."""
    made: Packed = np.empty(nbytes + _LINE_BYTES, dtype=np.uint8)
    return made[-made.ctypes.data % _LINE_BYTES :][:nbytes]


@dataclass(frozen=True, slots=True)
class RowColumn:
    """``width`` bytes of every row: row r's begin at ``start + r * stride`` from the pool's address."""

    start: int
    stride: int
    width: int


def row_columns(pool: Pool, layers: range | None = None) -> tuple[RowColumn, ...]:
    """Where K and V of ``layers`` (None: all) lie, in the pool's own order; neighbours are one column."""
    item = pool.layout.dtype_bytes
    chosen = range(pool.layout.layers) if layers is None else layers
    found: list[RowColumn] = []
    k, v = row_views(pool)
    for layer in chosen:
        for views in (k, v):
            if not views:
                continue
            view = views[layer]
            found.append(RowColumn(view.start * item, view.row * item, view.heads * view.dim * item))
    return _joined(found)


def _joined(columns: Sequence[RowColumn]) -> tuple[RowColumn, ...]:
    joined: list[RowColumn] = []
    for column in columns:
        last = joined[-1] if joined else None
        if last is not None and last.stride == column.stride and last.start + last.width == column.start:
            joined[-1] = RowColumn(last.start, last.stride, last.width + column.width)
        else:
            joined.append(column)
    return tuple(joined)


class PoolRows(Protocol):
    """Rows of one pool, or of some of its layers. ``gather`` and ``scatter`` are called by one thread at a time."""

    @property
    def columns(self) -> tuple[RowColumn, ...]: ...

    def gather(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        """Fill ``packed`` (rows x the column's width) with the column's part of ``rows``, in their order."""
        ...

    def scatter(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        """Write ``packed`` to the column's part of ``rows``."""
        ...

    def gather_summed(self, column: int, rows: RowNumbers, packed: Packed) -> int:
        """As :meth:`gather`; returns XXH3 (64 bits) of ``packed``."""
        ...

    def scatter_summed(self, column: int, rows: RowNumbers, packed: Packed) -> int:
        """As :meth:`scatter`; returns XXH3 (64 bits) of ``packed``."""
        ...


class SummedAfterwards(ABC):
    """Sums packed bytes when they were copied."""

    @abstractmethod
    def gather(self, column: int, rows: RowNumbers, packed: Packed) -> None: ...

    @abstractmethod
    def scatter(self, column: int, rows: RowNumbers, packed: Packed) -> None: ...

    def gather_summed(self, column: int, rows: RowNumbers, packed: Packed) -> int:
        self.gather(column, rows, packed)
        return xxhash.xxh3_64_intdigest(packed.data)

    def scatter_summed(self, column: int, rows: RowNumbers, packed: Packed) -> int:
        self.scatter(column, rows, packed)
        return xxhash.xxh3_64_intdigest(packed.data)


class HostPoolRows(SummedAfterwards):
    """Rows of a pool on a host device: copies of this process, without Python's lock."""

    def __init__(self, pool: Pool, layers: range | None = None) -> None:
        self._pool = pool
        self.columns = row_columns(pool, layers)

    def gather(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        where = self.columns[column]
        address = self._pool.address + where.start
        streamed = len(packed) > _CACHED_BYTES
        _kvcached.gather_rows(packed.ctypes.data, address, where.stride, where.width, rows, streamed)

    def scatter(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        where = self.columns[column]
        address = self._pool.address + where.start
        _kvcached.scatter_rows(address, where.stride, where.width, rows, packed.ctypes.data)

    def gather_summed(self, column: int, rows: RowNumbers, packed: Packed) -> int:
        if len(packed) < _LEAST_SUMMED_BYTES:
            return super().gather_summed(column, rows, packed)
        where = self.columns[column]
        address = self._pool.address + where.start
        return _kvcached.gather_summed_rows(packed.ctypes.data, address, where.stride, where.width, rows, True)

    def scatter_summed(self, column: int, rows: RowNumbers, packed: Packed) -> int:
        if len(packed) < _LEAST_SUMMED_BYTES:
            return super().scatter_summed(column, rows, packed)
        where = self.columns[column]
        address = self._pool.address + where.start
        return _kvcached.scatter_summed_rows(address, where.stride, where.width, rows, packed.ctypes.data)


class DevicePoolRows(SummedAfterwards):
    """Rows of a pool on a GPU: gathered into one buffer of the device by one kernel, then one copy over the link, on a
    stream of their own (AQUA 6: many small pieces reach a fraction of a link's rate).

    Both calls return when the bytes are there. On the CPU, for tests, the same without a stream.
    """

    def __init__(self, pool: Pool, layers: range | None = None) -> None:
        import torch

        self.columns = row_columns(pool, layers)
        self._flat = torch.from_dlpack(pool.memory())
        self._rows = pool.rows
        self._on_gpu = self._flat.device.type == "cuda"
        self._stream = torch.cuda.Stream(self._flat.device) if self._on_gpu else None

    def gather(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        import torch

        if self._on_gpu:
            torch.cuda.synchronize(self._flat.device)  # steps in flight may still write the rows
        with torch.cuda.stream(self._stream):
            taken = self._view(column).index_select(0, self._indices(rows))
            torch.from_numpy(packed).copy_(taken.view(torch.uint8).view(-1), non_blocking=True)
        self._finish()

    def scatter(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        import torch

        view = self._view(column)
        with torch.cuda.stream(self._stream):
            there = torch.from_numpy(packed).to(view.device, non_blocking=True)
            view.index_copy_(0, self._indices(rows), there.view(view.dtype).view(len(rows), -1))
        self._finish()

    def _view(self, column: int) -> Any:
        """The column as a matrix of rows, in the widest elements that fit it."""
        import torch

        where = self.columns[column]
        size = next(n for n in (8, 4, 2, 1) if not (where.start % n or where.stride % n or where.width % n))
        dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
        flat = self._flat[: self._flat.numel() // size * size].view(dtype)
        return flat.as_strided((self._rows, where.width // size), (where.stride // size, 1), where.start // size)

    def _indices(self, rows: RowNumbers) -> Any:
        import torch

        return torch.from_numpy(rows).to(self._flat.device, non_blocking=True)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class CopiedRows(SummedAfterwards):
    """A copy of some rows of another pool, by the same numbers: they may change or go meanwhile."""

    def __init__(self, source: PoolRows, rows: RowNumbers) -> None:
        self.columns = source.columns
        self._order = np.argsort(rows)
        self._sorted = rows[self._order]
        self._data: list[Packed] = []
        for column, where in enumerate(source.columns):
            packed = packed_bytes(len(rows) * where.width)
            source.gather(column, rows, packed)
            self._data.append(packed)

    def gather(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        width, places = self.columns[column].width, self._places(rows)
        _kvcached.gather_rows(packed.ctypes.data, self._data[column].ctypes.data, width, width, places)

    def gather_summed(self, column: int, rows: RowNumbers, packed: Packed) -> int:
        if len(packed) < _LEAST_SUMMED_BYTES:
            return super().gather_summed(column, rows, packed)
        width, places = self.columns[column].width, self._places(rows)
        data = self._data[column].ctypes.data
        return _kvcached.gather_summed_rows(packed.ctypes.data, data, width, width, places, True)

    def _places(self, rows: RowNumbers) -> RowNumbers:
        """Raises ``KeyError`` for rows that were not copied."""
        found = np.searchsorted(self._sorted, rows)
        if len(rows) and not np.array_equal(self._sorted[np.minimum(found, len(self._sorted) - 1)], rows):
            raise KeyError("rows that were not copied")
        return np.ascontiguousarray(self._order[found])

    def scatter(self, column: int, rows: RowNumbers, packed: Packed) -> None:
        raise TypeError("a copy of rows is read only")


def pool_rows(pool: Pool, device: str, layers: range | None = None) -> PoolRows:
    """The rows of ``pool`` on ``device`` (``host:0``, ``cuda:1``)."""
    return HostPoolRows(pool, layers) if device.startswith("host:") else DevicePoolRows(pool, layers)
