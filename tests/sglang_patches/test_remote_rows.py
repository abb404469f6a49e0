"""Rows of KV as engines exchange them: of heads, latent ones, and of layers that see a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_patches.remote_rows import (
    RowShape,
    foreign_pool,
    read_rows,
    slot_count,
    strange_rows,
    write_rows,
)

LAYERS, SLOTS = 4, 12
HEADS, KEY, VALUE, LATENT = 2, 3, 5, 7


@dataclass
class MHATokenToKVPool:
    layers: int = LAYERS
    slots: int = SLOTS
    head_num: int = HEADS
    head_dim: int = KEY
    v_head_dim: int = VALUE
    page_size: int = 1
    store_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        shape = self.slots, self.head_num
        self.k_buffer = [torch.rand((*shape, self.head_dim)) for _ in range(self.layers)]
        self.v_buffer = [torch.rand((*shape, self.v_head_dim)) for _ in range(self.layers)]


class MLATokenToKVPool:
    kv_lora_rank, kv_cache_dim, page_size, store_dtype = LATENT - 2, LATENT, 1, torch.float32

    def __init__(self) -> None:
        self.kv_buffer = [torch.rand((SLOTS, 1, LATENT)) for _ in range(LAYERS)]


class SWAKVPool:
    """Layers 0 and 2 see a window, for which there are few slots: those of the slots 3, 5 and 9."""

    def __init__(self, window_heads: int = HEADS) -> None:
        self.full_kv_pool = MHATokenToKVPool(layers=2)
        self.swa_kv_pool = MHATokenToKVPool(layers=2, slots=5, head_num=window_heads)
        self.layers_mapping = {0: (0, True), 1: (0, False), 2: (1, True), 3: (1, False)}
        self.full_to_swa_index_mapping = torch.zeros(SLOTS + 1, dtype=torch.int64)
        self.full_to_swa_index_mapping[[3, 5, 9]] = torch.tensor([2, 1, 4])

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[slots]


def rows_in(pool: Any, layer: int, slot: int) -> list[list[float]]:
    """The parts of one token in one layer, by hand."""
    if isinstance(pool, SWAKVPool):
        at, sees_window = pool.layers_mapping[layer]
        if sees_window:
            return rows_in(pool.swa_kv_pool, at, int(pool.full_to_swa_index_mapping[slot]))
        return rows_in(pool.full_kv_pool, at, slot)
    if isinstance(pool, MLATokenToKVPool):
        return [pool.kv_buffer[layer][slot].flatten().tolist()]
    return [one[layer][slot].flatten().tolist() for one in (pool.k_buffer, pool.v_buffer)]


@pytest.mark.parametrize("make", [MHATokenToKVPool, MLATokenToKVPool, SWAKVPool])
def test_what_is_read_of_one_pool_and_written_to_another_is_there(make: Any) -> None:
    ours, theirs = make(), make()
    slots, layers = torch.tensor([9, 3, 5]), range(1, 4)
    assert strange_rows(ours) == "" and slot_count(ours) == SLOTS
    parts = read_rows(theirs, layers, slots)
    assert [tuple(part.shape) for part in parts] == RowShape.of(ours).shapes(3, 3)
    before = rows_in(ours, 0, 3)
    write_rows(ours, layers, slots, parts)
    for layer in layers:
        for slot in (9, 3, 5):
            assert rows_in(ours, layer, slot) == rows_in(theirs, layer, slot)
    assert rows_in(ours, 0, 3) == before


def test_what_has_left_a_window_is_written_to_no_slot() -> None:
    pool = SWAKVPool()
    before = [buffer.clone() for buffer in pool.swa_kv_pool.k_buffer]
    slots = torch.tensor([4, 5])  # the first has no slot in the window any more
    parts = [torch.ones(shape) for shape in RowShape.of(pool).shapes(LAYERS, 2)]
    write_rows(pool, range(LAYERS), slots, parts)
    for now, was in zip(pool.swa_kv_pool.k_buffer, before, strict=True):
        changed = (now != was).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [1], "only the slot that 5 has in the window, and not the one that means none"
    assert bool((pool.full_kv_pool.k_buffer[0][4] == 1).all()), "layers that see everything have it"


@pytest.mark.parametrize("make", [MHATokenToKVPool, MLATokenToKVPool, SWAKVPool])
def test_what_is_kept_for_a_leader_has_a_row_of_each_layer_in_each_slot(make: Any) -> None:
    own, layers = make(), range(1, 4)
    shape = RowShape.of(own)
    flat = torch.zeros(SLOTS * len(layers) * shape.elements)
    kept = foreign_pool(own, flat, layers, SLOTS)
    assert (kept.start_layer, kept.end_layer, kept.layer_num, kept.size) == (1, 3, 3, SLOTS - 1)
    parts = [torch.rand(wanted) for wanted in shape.shapes(len(layers), 2)]
    write_rows(kept, range(3), torch.tensor([7, 2]), parts)
    assert all(map(torch.equal, read_rows(kept, range(3), torch.tensor([7, 2])), parts))
    slot_elements = len(layers) * shape.elements
    assert flat.view(SLOTS, slot_elements).count_nonzero(1).nonzero().flatten().tolist() == [2, 7], "slot by slot"
    in_order = torch.cat([part[layer, 1].flatten() for layer in range(3) for part in parts])
    assert torch.equal(flat.view(SLOTS, slot_elements)[2], in_order)


def test_ranks_have_heads_of_their_own_and_the_same_latents() -> None:
    heads, latents = RowShape.of(MHATokenToKVPool()), RowShape.of(MLATokenToKVPool())
    assert heads.shapes(2, 3, ranks=2) == [(2, 3, 2 * HEADS, KEY), (2, 3, 2 * HEADS, VALUE)]
    assert latents.shapes(2, 3, ranks=2) == [(2, 3, 1, LATENT)]
    assert (heads.nbytes, latents.nbytes) == (4 * HEADS * (KEY + VALUE), 4 * LATENT)


def test_whose_rows_are_not_exchanged() -> None:
    assert strange_rows(SWAKVPool(window_heads=1)) == "windows whose heads differ from those of other layers"
    assert strange_rows(object()) == "KV of object"
