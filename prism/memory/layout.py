"""How a model's KV cache is laid out in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["token", "layer"]

_WASTE = 1 / 16
_MOST_UNIT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Sizes of one group of layers.

    ``order="token"``: K and V of one token in all layers are adjacent, so that memory grows by single pages; rows of
    one layer are strided. ``order="layer"``: each layer's K rows are contiguous, and so are its V rows; memory grows
    by a page or more in every layer at once.

    ``v_head_dim`` ``None`` means as ``head_dim``; 0 means no V at all (MLA: ``kv_heads=1``, ``head_dim=kv_lora_rank +
    qk_rope_head_dim``). ``tokens_per_slot`` above 1 makes a slot a page of that many tokens, for paged attention.
    ``page_multiple`` makes physical pages that many granules (2 MiB) large. A hybrid model has one layout per group.
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype_bytes: int = 2
    order: Order = "token"
    page_multiple: int = 1
    tokens_per_slot: int = 1

    @property
    def v_dim(self) -> int:
        """Elements of one head's V row."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def cell_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.layers * self.kv_heads * (self.head_dim + self.v_dim) * self.dtype_bytes


def state_layout(nbytes: int, page_bytes: int) -> KvLayout:
    """Slots of ``nbytes`` or a little more whose inside is the engine's business (a Mamba state: tens of MiB). Padded
    so that a few pages hold whole slots, where blocks that lose no more than usual would be of sixteen slots: the
    fewest pages with at most a sixteenth lost, or what loses least."""
    cell = -(-nbytes // 256) * 256
    if cell > page_bytes * _WASTE:
        least = -(-cell // page_bytes)
        sizes = [pages * page_bytes // _slots_in(pages * page_bytes, cell) for pages in range(least, least + 16)]
        cell = next((size for size in sizes if size - cell <= size * _WASTE), min(sizes))
    unit = min(cell & -cell, _MOST_UNIT)
    return KvLayout(layers=1, kv_heads=cell // unit, head_dim=unit, v_head_dim=0, dtype_bytes=1)


def _slots_in(block_bytes: int, cell: int) -> int:
    """The most slots of at least ``cell`` bytes that divide a block evenly."""
    return next(count for count in range(block_bytes // cell, 0, -1) if block_bytes % count == 0)
