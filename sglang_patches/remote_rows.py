"""What attention keeps of a token in one layer, as engines exchange it: by SGLang's pool.

::

    heads     K of all heads | V of all heads    two parts; each rank of a tensor-parallel engine has its heads'
    latent    latent | rope                      one part, the same on all ranks
    windows   as heads                           of layers that see a window the engine's own pool has only the rows
                                                 that are inside, in slots of their own

Peers number slots as their leader does (:mod:`sglang_patches.remote_layers`), and need no table for windows: what they
keep for it has a row of every layer in every slot (:func:`foreign_pool`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

_POOLS: Final = frozenset({"MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool"})


def strange_rows(pool: Any) -> str:
    """Why rows of this pool of SGLang's are not exchanged; empty: they are."""
    name = type(pool).__name__
    if name not in _POOLS:
        return f"KV of {name}"
    if name == "SWAKVPool" and RowShape.of(pool.full_kv_pool) != RowShape.of(pool.swa_kv_pool):
        return "windows whose heads differ from those of other layers"
    return ""


@dataclass(frozen=True, slots=True)
class RowShape:
    """Of one token and layer."""

    parts: tuple[tuple[int, int], ...]
    """Heads and dim of each part; on this rank."""
    dtype: torch.dtype
    dealt: bool
    """Each rank has its heads. False: all ranks have the same."""

    @classmethod
    def of(cls, pool: Any) -> RowShape:
        """Of a pool that is not :func:`strange_rows`."""
        pool = _plain(pool)
        if _is_latent(pool):
            return cls(((1, int(pool.kv_cache_dim)),), pool.store_dtype, False)
        heads = int(pool.head_num)
        return cls(((heads, int(pool.head_dim)), (heads, int(pool.v_head_dim))), pool.store_dtype, True)

    @property
    def elements(self) -> int:
        return sum(heads * dim for heads, dim in self.parts)

    @property
    def nbytes(self) -> int:
        return self.elements * int(self.dtype.itemsize)

    def shapes(self, layers: int, tokens: int, ranks: int = 1) -> list[tuple[int, int, int, int]]:
        """Of the parts of so many layers and tokens, with all heads of so many ranks."""
        times = ranks if self.dealt else 1
        return [(layers, tokens, times * heads, dim) for heads, dim in self.parts]


def has_plain_rows(pool: Any) -> bool:
    """K and V of heads, of every token in every layer."""
    return pool is _plain(pool) and not _is_latent(pool)


def slot_count(pool: Any) -> int:
    """How many slots a pool has, the one that means nothing included."""
    return int(_buffers(pool)[0][0].shape[0])


def read_rows(pool: Any, layers: range, slots: Any) -> list[torch.Tensor]:
    """The parts of these layers (counted from the pool's first) and slots, copied once: ``[layers, slots, heads,
    dim]``. What has left a window is anything."""
    first = _buffers(pool)[0][0]
    index, shape = slots.to(first.device), RowShape.of(pool)
    found = [first.new_empty(wanted) for wanted in shape.shapes(len(layers), len(index))]
    for i, layer in enumerate(layers):
        inner, at = _where(pool, layer)
        of_layer = index if inner is _plain(pool) else pool.translate_loc_from_full_to_swa(index)
        for rows, buffers in zip(found, _buffers(inner), strict=True):
            torch.index_select(buffers[at], 0, of_layer, out=rows[i])
    return found


def write_rows(pool: Any, layers: range, slots: Any, parts: Sequence[Any]) -> None:
    """As :func:`read_rows` has them. What has left a window goes nowhere."""
    for i, layer in enumerate(layers):
        inner, at = _where(pool, layer)
        if inner is _plain(pool):
            for buffers, rows in zip(_buffers(inner), parts, strict=True):
                buffers[at][slots] = rows[i]
            continue
        of_window = pool.translate_loc_from_full_to_swa(slots.to(pool.full_to_swa_index_mapping.device))
        inside = of_window > 0
        for buffers, rows in zip(_buffers(inner), parts, strict=True):
            buffers[at][of_window[inside]] = rows[i][inside.to(rows.device)]


def foreign_pool(own: Any, flat: Any, layers: range, slots: int) -> Any:
    """SGLang's pool as it is, for ``slots`` slots of ``layers``, over other memory: ``flat``, in the pool's type, slot
    by slot, in each layer by layer, in each part by part."""
    own = _plain(own)
    pool, shape, count = copy.copy(own), RowShape.of(own), len(layers)
    sizes = [heads * dim for heads, dim in shape.parts]
    views = [
        [
            flat.as_strided((slots, heads, dim), (count * shape.elements, dim, 1), layer * shape.elements + at)
            for layer in range(count)
        ]
        for (heads, dim), at in zip(shape.parts, accumulate(sizes, initial=0), strict=False)
    ]
    if _is_latent(own):
        (pool.kv_buffer,) = views
    else:
        pool.k_buffer, pool.v_buffer = views
    pool.start_layer, pool.end_layer, pool.layer_num = layers.start, layers.stop - 1, count
    pool.size = slots - own.page_size
    return pool


def _plain(pool: Any) -> Any:
    """The pool of what every layer keeps."""
    return getattr(pool, "full_kv_pool", pool)


def _where(pool: Any, layer: int) -> tuple[Any, int]:
    """The pool that has a layer's rows, and its number there."""
    if pool is _plain(pool):
        return pool, layer
    at, sees_window = pool.layers_mapping[layer]
    return (pool.swa_kv_pool if sees_window else pool.full_kv_pool), at


def _buffers(pool: Any) -> tuple[Sequence[Any], ...]:
    """Of each part the buffers of the pool's layers: ``[slots, heads, dim]``."""
    pool = _plain(pool)
    return (pool.kv_buffer,) if _is_latent(pool) else (pool.k_buffer, pool.v_buffer)


def _is_latent(pool: Any) -> bool:
    return hasattr(pool, "kv_lora_rank")
