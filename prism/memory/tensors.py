"""K and V of a pool as tensors, without copies.

A view has one row per token: ``[pool.rows, kv_heads, head_dim]``; slot ``s`` is the rows ``s * tokens_per_slot`` and
following. Rows of slots that were not handed out may have no memory behind them: touching them is a fault. Row 0
(slot 0) always has. Views stay valid until the arena is divided again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prism.memory._kvcached import Pool
from prism.memory.errors import BadLayout
from prism.memory.layout import KvLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RowView:
    """Where one layer's K or V rows lie, in elements: row r, head h, element e is at ``start + r*row + h*dim + e``."""

    start: int
    row: int
    rows: int
    heads: int
    dim: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.rows, self.heads, self.dim)

    @property
    def strides(self) -> tuple[int, int, int]:
        return (self.row, self.dim, 1)


def row_views(pool: Pool) -> tuple[list[RowView], list[RowView]]:
    """K and V views of every layer, offsets from ``pool.address``. V is empty for layouts without V."""
    layout = pool.layout
    k: list[RowView] = []
    v: list[RowView] = []
    dims, item = (layout.head_dim, layout.v_dim), layout.dtype_bytes
    for which, start_bytes, row_bytes in _places(pool, layout):
        view = RowView(start_bytes // item, row_bytes // item, pool.rows, layout.kv_heads, dims[which])
        (k, v)[which].append(view)
    return k, v


def _places(pool: Pool, layout: KvLayout) -> Iterator[tuple[int, int, int]]:
    """(0 for K or 1 for V, start, row stride), both in bytes, layer by layer."""
    sizes = [layout.kv_heads * dim * layout.dtype_bytes for dim in (layout.head_dim, layout.v_dim)]
    kinds = [which for which in (0, 1) if sizes[which]]
    regions = iter(pool.regions)
    if layout.order == "layer":
        for _ in range(layout.layers):
            for which in kinds:
                offset, row, _ = next(regions)
                yield which, offset, row
        return
    offset, row, _ = next(regions)
    for layer in range(layout.layers):
        for which in kinds:
            yield which, offset + layer * sum(sizes) + (sizes[0] if which else 0), row


def torch_views(pool: Pool, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of every layer as strided torch tensors; ``BadLayout`` if the dtype's size is not the layout's."""
    import torch

    _check_item(pool, dtype.itemsize)
    flat = torch.from_dlpack(pool.memory()).view(dtype)
    k, v = row_views(pool)
    return (
        [flat.as_strided(x.shape, x.strides, x.start) for x in k],
        [flat.as_strided(x.shape, x.strides, x.start) for x in v],
    )


def cupy_views(pool: Pool, dtype: Any) -> tuple[list[Any], list[Any]]:
    """K and V of every layer as strided CuPy arrays (CUDA devices)."""
    import cupy

    return _strided(pool, cupy.from_dlpack(pool.memory()), cupy.dtype(dtype), cupy.lib.stride_tricks.as_strided)


def numpy_views(pool: Pool, dtype: Any) -> tuple[list[Any], list[Any]]:
    """K and V of every layer as strided, writable numpy arrays (host devices)."""
    import numpy as np

    flat = np.from_dlpack(pool.memory())
    return _strided(pool, flat, np.dtype(dtype), np.lib.stride_tricks.as_strided)


def _strided(pool: Pool, raw: Any, dtype: Any, as_strided: Any) -> tuple[list[Any], list[Any]]:
    _check_item(pool, dtype.itemsize)
    flat = raw.view(dtype)

    def view(x: RowView) -> Any:
        return as_strided(flat[x.start :], x.shape, tuple(stride * dtype.itemsize for stride in x.strides))

    k, v = row_views(pool)
    return [view(x) for x in k], [view(x) for x in v]


def _check_item(pool: Pool, itemsize: int) -> None:
    expected = pool.layout.dtype_bytes
    if itemsize != expected:
        raise BadLayout(
            "the dtype has another size than the layout", {"dtype_bytes": itemsize, "layout_bytes": expected}
        )
