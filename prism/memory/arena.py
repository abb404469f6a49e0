"""Arenas: address space that is divided into KV pools, for one model after the other."""

from __future__ import annotations

from collections.abc import Sequence

from prism.memory import _kvcached
from prism.memory._kvcached import Pool
from prism.memory.layout import KvLayout

_ELASTIC = -1


class Arena:
    """Reserved addresses of one engine. Pools made from it keep it alive."""

    def __init__(self, core: _kvcached.CoreArena) -> None:
        self._core = core

    @property
    def virtual_bytes(self) -> int:
        """Length of the range."""
        return self._core.virtual_bytes

    @property
    def address(self) -> int:
        """Start of the range; stays the same for the arena's life."""
        return self._core.address

    def divide(
        self, layout: KvLayout, max_tokens: int, lease_bytes: int | None = None, *, timeout_s: float = 0.0
    ) -> Pool:
        """Lay out a pool for one model, closing the pools of the division before.

        ``lease_bytes``: how much the pool holds exclusively from now on (whole blocks, at least one); ``None``:
        elastic, the lease follows use. ``timeout_s``: how long other owners have to give way before it is
        ``OutOfMemory``. On ``BadLayout``, ``OutOfMemory``, ``LimitExceeded`` the old pools live on.
        """
        return self.divide_groups([(layout, max_tokens, lease_bytes)], timeout_s=timeout_s)[0]

    def divide_groups(
        self, groups: Sequence[tuple[KvLayout, int, int | None]], *, timeout_s: float = 0.0
    ) -> list[Pool]:
        """As ``divide`` for hybrid models: a pool for each group of layers, one behind the other."""
        return self._core.divide([_group(*group) for group in groups], timeout_s)

    def close(self) -> None:
        """Close the pools. The addresses are given back when nothing refers to the arena any more."""
        self._core.close()


def _group(layout: KvLayout, max_tokens: int, lease_bytes: int | None) -> _kvcached.Group:
    return (
        layout.layers,
        layout.kv_heads,
        layout.head_dim,
        layout.v_dim,
        layout.dtype_bytes,
        layout.order == "layer",
        layout.page_multiple,
        layout.tokens_per_slot,
        max_tokens,
        _ELASTIC if lease_bytes is None else lease_bytes,
    )
