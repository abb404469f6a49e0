"""Slots go to the sequences they were announced for: each has blocks of its own where blocks are small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prism import memory
from prism.memory import errors
from sglang_patches.kv_placement import SlotPlacement, own_blocks

PAGE_BYTES = 65536
ROWS = 8


def pool_of(directory: Path, slots_a_page: int, pages: int = 40) -> memory.Pool:
    """A pool of one leased range; blocks of ``slots_a_page``."""
    device = memory.open_device("host:0", pages * PAGE_BYTES, account_dir=directory, page_bytes=PAGE_BYTES)
    layout = memory.KvLayout(layers=2, kv_heads=1, head_dim=PAGE_BYTES // slots_a_page // 8)
    arena = device.register("a").arena(2 * pages * PAGE_BYTES)
    return arena.divide(layout, max_tokens=(pages - 1) * slots_a_page, lease_bytes=pages * PAGE_BYTES)


def blocks(pool: memory.Pool, slots: np.ndarray) -> set[int]:
    return set((slots // pool.block_slots).tolist())


def start(placement: SlotPlacement, rows: list[int], lengths: list[int]) -> list[np.ndarray]:
    """The slots of each prompt."""
    with placement.prompts(lengths):
        slots = placement.take(sum(lengths))
    placement.remember(np.array(rows), ROWS)
    return np.split(slots, np.cumsum(lengths)[:-1])


def go_on(placement: SlotPlacement, rows: list[int], count: int) -> list[np.ndarray]:
    """The slots of each sequence over ``count`` steps."""
    steps = []
    for _ in range(count):
        with placement.steps(np.array(rows)):
            steps.append(placement.take(len(rows)))
    return list(np.stack(steps, axis=1))


def test_sequences_share_no_block(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 16)
    assert own_blocks(pool)
    placement = SlotPlacement(pool)
    prompts = start(placement, [3, 1, 5], [20, 16, 3])
    later = go_on(placement, [5, 3, 1], 30)
    a, b, c = (np.concatenate(parts) for parts in zip(prompts, [later[1], later[2], later[0]], strict=True))
    assert not (
        blocks(pool, a) & blocks(pool, b) or blocks(pool, a) & blocks(pool, c) or blocks(pool, b) & blocks(pool, c)
    )
    assert [len(blocks(pool, s)) for s in (a, b, c)] == [-(-50 // 16), -(-46 // 16), -(-33 // 16)]
    pool.free(np.concatenate([a, c]))
    assert pool.scattered() == 15 + (48 - 46), "the padding slot's block, and the end of the one that lives"
    pool.check()


def test_a_sequence_whose_prompt_was_given_back_goes_on_elsewhere(tmp_path: Path) -> None:
    """Two equal prompts: the prefix cache keeps the slots of one and gives back those of the other."""
    pool = pool_of(tmp_path, 16)
    placement = SlotPlacement(pool)
    kept, twice = start(placement, [1, 2], [20, 20])
    pool.free(twice)
    first, second = go_on(placement, [1, 2], 5)
    assert blocks(pool, first) <= blocks(pool, kept)
    assert len(blocks(pool, second)) == 1 and not blocks(pool, second) & blocks(pool, kept)


def test_large_blocks_are_shared(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 128)
    assert not own_blocks(pool)
    placement = SlotPlacement(pool)
    prompts = start(placement, [1, 2], [20, 20])
    later = go_on(placement, [1, 2], 20)
    assert len(blocks(pool, np.concatenate(prompts + later))) == 1


def test_without_a_name_and_under_pressure_slots_come_from_anywhere(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 16, pages=4)
    placement = SlotPlacement(pool)
    start(placement, [1, 2, 3], [2, 2, 2])
    assert len(placement.take(4)) == 4
    rest = pool.available()
    assert len(go_on(placement, [1, 2, 3], rest // 3)) == 3
    with placement.steps(np.array([1, 2, 3])), pytest.raises(errors.OutOfMemory):
        placement.take(3)
    used = pool.used()
    with placement.prompts([1, pool.available() + 1]), pytest.raises(errors.OutOfMemory):
        placement.take(pool.available() + 2)
    assert pool.used() == used, "all or nothing"
    pool.check()
