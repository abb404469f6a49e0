"""Packing rows and putting them elsewhere: the same bytes, whatever the pool's layout, on both ways of copying."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prism import memory
from prism.memory import _kvcached
from prism.memory.rows import CopiedRows, DevicePoolRows, HostPoolRows, PoolRows, packed_bytes, row_columns

TOKEN = memory.KvLayout(layers=3, kv_heads=2, head_dim=8, dtype_bytes=2)
LAYOUTS = {
    "token-major": TOKEN,
    "layer-major": replace(TOKEN, order="layer"),
    "latent": replace(TOKEN, kv_heads=1, head_dim=9, v_head_dim=0),
    "gaps": replace(TOKEN, layers=5, head_dim=7),
    "paged": replace(TOKEN, tokens_per_slot=4),
    "a state a request": replace(TOKEN, layers=2, kv_heads=1, head_dim=1000, v_head_dim=16),
}
Kind = Callable[..., PoolRows]


def divide(directory: Path, layout: memory.KvLayout, name: str = "a") -> memory.Pool:
    device = memory.open_device("host:0", 16 << 20, account_dir=directory, page_bytes=65536)
    return device.register(name).arena(32 << 20).divide(layout, 800)


def take(pool: memory.Pool, tokens: int) -> np.ndarray:  # type: ignore[type-arg]
    """Rows in use, as engines number them, in no order."""
    per_slot = pool.layout.tokens_per_slot
    slots = np.random.default_rng(1).permutation(pool.alloc(-(-tokens // per_slot)))
    return (slots[:, None] * per_slot + np.arange(per_slot)).reshape(-1)[:tokens].copy()


def fill(rows: PoolRows, pool: memory.Pool, numbers: np.ndarray, seed: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    """Random bytes in every column of the rows, put there byte for byte."""
    made = []
    for column in rows.columns:
        data = np.random.default_rng(seed).integers(0, 256, (len(numbers), column.width), dtype=np.uint8)
        for row, content in zip(numbers, data, strict=True):
            ctypes.memmove(pool.address + column.start + int(row) * column.stride, content.tobytes(), column.width)
        made.append(data.reshape(-1))
    return made


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", [HostPoolRows, DevicePoolRows])
def test_rows_move_to_others_of_another_engine(tmp_path: Path, layout: memory.KvLayout, kind: Kind) -> None:
    source, target = divide(tmp_path, layout), divide(tmp_path, layout, "b")
    out, back = kind(source), kind(target)
    there, here = take(source, 150), take(target, 150)[::-1].copy()
    made = fill(out, source, there, 3)
    for column, expected in enumerate(made):
        packed = np.empty(len(expected), dtype=np.uint8)
        out.gather(column, there, packed)
        assert packed.tobytes() == expected.tobytes()
        back.scatter(column, here, packed)
        again = np.empty_like(packed)
        HostPoolRows(target).gather(column, here, again)
        assert again.tobytes() == packed.tobytes()
    source.check(), target.check()


def test_neighbours_are_one_column_and_layers_can_be_chosen(tmp_path: Path) -> None:
    pool = divide(tmp_path, TOKEN)
    cell, layer = TOKEN.cell_bytes, TOKEN.cell_bytes // 3
    assert [c.width for c in row_columns(pool)] == [cell]
    assert [(c.start, c.width) for c in row_columns(pool, range(1, 3))] == [(layer, 2 * layer)]
    by_layer = divide(tmp_path, LAYOUTS["layer-major"], "b")
    assert [c.width for c in row_columns(by_layer, range(1, 2))] == [layer // 2] * 2
    assert len(row_columns(by_layer)) == 6


def test_some_layers_leave_the_others_alone(tmp_path: Path) -> None:
    source, target = divide(tmp_path, TOKEN), divide(tmp_path, TOKEN, "b")
    rows = take(source, 40), take(target, 40)
    made, kept = fill(HostPoolRows(source), source, rows[0], 5)[0], fill(HostPoolRows(target), target, rows[1], 6)[0]
    chosen = range(1, 2)
    packed = np.empty(40 * TOKEN.cell_bytes // 3, dtype=np.uint8)
    HostPoolRows(source, chosen).gather(0, rows[0], packed)
    HostPoolRows(target, chosen).scatter(0, rows[1], packed)
    found = np.empty(40 * TOKEN.cell_bytes, dtype=np.uint8)
    HostPoolRows(target).gather(0, rows[1], found)
    expected = kept.reshape(40, 3, -1).copy()
    expected[:, 1] = made.reshape(40, 3, -1)[:, 1]
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("gap", [0, 24])
@pytest.mark.parametrize("width", [1, 63, 511, 512, 513, 1000, 4096, 5000])
def test_rows_in_runs_and_alone_are_copied_whole_and_nothing_else_is(width: int, gap: int, streamed: bool) -> None:
    """Widths around those at which the ways of copying change, at addresses of no alignment."""
    rows = np.array([5, 6, 7, 2, 9, 10, 0, 3, 14, 13, 12], dtype=np.int64)
    stride, made = width + gap, np.random.default_rng(width)
    pool = made.integers(0, 256, 16 * stride + 8, dtype=np.uint8)[3:]
    cells = pool[: 16 * stride].reshape(16, stride)[:, :width]
    packed = np.full(len(rows) * width + 8, 7, dtype=np.uint8)[5:]
    _kvcached.gather_rows(packed.ctypes.data, pool.ctypes.data, stride, width, rows, streamed)
    assert packed[:-3].tobytes() == cells[rows].tobytes()
    assert packed[-3:].tolist() == [7] * 3

    expected = pool.copy()
    brought = made.integers(0, 256, (len(rows), width), dtype=np.uint8)
    expected[: 16 * stride].reshape(16, stride)[rows, :width] = brought
    packed[:-3] = brought.reshape(-1)
    _kvcached.scatter_rows(pool.ctypes.data, stride, width, rows, packed.ctypes.data)
    assert pool.tobytes() == expected.tobytes()


@pytest.mark.parametrize("width", [1, 7, 64, 512, 1000, 4096, 5000, 1 << 16])
@pytest.mark.parametrize("runs", [False, True])
def test_what_is_copied_is_summed_as_the_library_sums_it(width: int, runs: bool) -> None:
    """The bytes are those of the way without a sum, the sum is XXH3 of them: of lengths at and around its stripes."""
    for count in (1, 2, 3, 9, 33):
        if width * count < 241:
            with pytest.raises(ValueError, match="too few"):
                _kvcached.gather_summed_rows(0, 0, width, width, np.arange(count))
            continue
        made, gap = np.random.default_rng(count), 0 if runs else 16
        pool = made.integers(0, 256, (2 * count, width + gap), dtype=np.uint8)
        rows = np.arange(count) + 1 if runs else made.permutation(2 * count)[:count].copy()
        packed, again = (np.zeros(count * width, dtype=np.uint8) for _ in range(2))
        for streamed in (False, True):
            found = _kvcached.gather_summed_rows(
                packed.ctypes.data, pool.ctypes.data, width + gap, width, rows, streamed
            )
            _kvcached.gather_rows(again.ctypes.data, pool.ctypes.data, width + gap, width, rows)
            assert packed.tobytes() == again.tobytes() == pool[rows, :width].tobytes()
            assert found == xxhash.xxh3_64_intdigest(packed.data)
        target, expected = pool.copy(), pool.copy()
        brought = made.integers(0, 256, (count, width), dtype=np.uint8)
        expected[rows, :width] = brought
        found = _kvcached.scatter_summed_rows(target.ctypes.data, width + gap, width, rows, brought.ctypes.data)
        assert target.tobytes() == expected.tobytes() and found == xxhash.xxh3_64_intdigest(brought.data)


@pytest.mark.parametrize("width", [64, 256, 1024, 4096, 5056, 12 << 10, 1 << 16])
@pytest.mark.parametrize("gap", [0, 64, 4096])
def test_whole_lines_are_summed_as_they_are_copied(width: int, gap: int) -> None:
    """The same where both lie at lines of the caches: in one pass, of more and less than what is asked for ahead."""
    for count in (4, 5, 17, 40):
        made, stride = np.random.default_rng(count), width + gap
        pool = packed_bytes(2 * count * stride)
        pool[:] = made.integers(0, 256, len(pool), dtype=np.uint8)
        cells = pool.reshape(2 * count, stride)
        rows = made.permutation(2 * count)[:count].copy()
        packed = packed_bytes(count * width)
        found = _kvcached.gather_summed_rows(packed.ctypes.data, pool.ctypes.data, stride, width, rows, True)
        assert packed.tobytes() == cells[rows, :width].tobytes() and found == xxhash.xxh3_64_intdigest(packed.data)
        packed[:] = made.integers(0, 256, len(packed), dtype=np.uint8)
        expected = cells.copy()
        expected[rows, :width] = packed.reshape(count, width)
        found = _kvcached.scatter_summed_rows(pool.ctypes.data, stride, width, rows, packed.ctypes.data)
        assert pool.tobytes() == expected.tobytes() and found == xxhash.xxh3_64_intdigest(packed.data)


def test_a_copy_of_rows_gives_what_was_copied(tmp_path: Path) -> None:
    pool = divide(tmp_path, LAYOUTS["gaps"])
    rows, numbers = HostPoolRows(pool), take(pool, 100)
    made = fill(rows, pool, numbers, 4)
    copied = CopiedRows(rows, np.sort(numbers))
    fill(rows, pool, numbers, 5)
    wanted = np.random.default_rng(2).permutation(100)[:40]
    for column, where in enumerate(rows.columns):
        packed = np.empty(40 * where.width, dtype=np.uint8)
        expected = made[column].reshape(100, -1)[wanted].tobytes()
        copied.gather(column, numbers[wanted].copy(), packed)
        assert packed.tobytes() == expected
        packed[:] = 0
        assert copied.gather_summed(column, numbers[wanted].copy(), packed) == xxhash.xxh3_64_intdigest(expected)
        assert packed.tobytes() == expected
    with pytest.raises(KeyError):
        copied.gather(0, np.array([799]), np.empty(rows.columns[0].width, dtype=np.uint8))
