"""How a model's KV cache is laid out in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["token", "layer"]


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
