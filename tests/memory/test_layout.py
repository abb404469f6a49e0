"""Geometry of layouts: slots, pages, gaps, views; against arithmetic done the slow way."""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import memory
from prism.memory import errors
from prism.memory.layout import Order
from tests.memory.drivers import CUDA, FAKE, Bed

PAGE = 65536
GIB = 1 << 30

layouts = st.builds(
    memory.KvLayout,
    layers=st.integers(1, 6),
    kv_heads=st.integers(1, 9),
    head_dim=st.integers(1, 300),
    v_head_dim=st.none() | st.integers(0, 300),
    dtype_bytes=st.sampled_from([1, 2, 4]),
    order=st.just("token"),
    page_multiple=st.integers(1, 3),
    tokens_per_slot=st.integers(1, 4),
)


def open_owner(directory: Path) -> memory.Owner:
    return memory.open_device("host:0", GIB, account_dir=directory, page_bytes=PAGE).register("layouts")


@settings(max_examples=150, deadline=None)
@given(layout=layouts, tokens=st.integers(1, 2000))
def test_token_major_slots_stand_alone(layout: memory.KvLayout, tokens: int) -> None:
    """No slot of one block touches another block, and as many slots can be in use as were asked for."""
    with tempfile.TemporaryDirectory() as directory, open_owner(Path(directory)) as owner:
        pool = owner.arena(4 * GIB).divide(layout, tokens)
        cell = layout.cell_bytes * layout.tokens_per_slot
        assert pool.slot_bytes == cell and pool.max_slots == -(-tokens // layout.tokens_per_slot)
        assert pool.block_bytes % (PAGE * layout.page_multiple) == 0
        slots = pool.alloc(pool.max_slots)
        first, last = slots * cell // pool.block_bytes, ((slots + 1) * cell - 1) // pool.block_bytes
        assert (first == last).all() and slots.max() * cell < pool.virtual_bytes
        assert len(np.unique(slots)) == len(slots) and pool.available() == 0
        # What straddling cells lose is little, and nothing where cells fit.
        per_block = len(slots) / max(1, len(np.unique(first)))
        assert math.gcd(pool.block_bytes, cell) == cell or cell <= pool.block_bytes / 16 or per_block >= 1
        pool.free(slots)
        pool.check()


@pytest.mark.parametrize(
    ("layout", "slots", "block_mib"),
    [
        (memory.KvLayout(layers=32, kv_heads=8, head_dim=128), 16, 2),
        (memory.KvLayout(layers=28, kv_heads=4, head_dim=128), 35, 2),
        (memory.KvLayout(layers=61, kv_heads=1, head_dim=576, v_head_dim=0), 28, 2),
        (memory.KvLayout(layers=80, kv_heads=8, head_dim=128), 18, 6),
        (memory.KvLayout(layers=32, kv_heads=8, head_dim=128, order="layer"), 1024, 128),
    ],
    ids=["llama-8b", "qwen2.5-7b", "deepseek-v3 latent", "llama-70b", "llama-8b layer-major"],
)
def test_known_models(layout: memory.KvLayout, slots: int, block_mib: int, tmp_path: Path) -> None:
    device = memory.open_device("host:0", 4 * GIB, account_dir=tmp_path)
    with device.register("known") as owner:
        pool = owner.arena(64 * GIB).divide(layout, 10_000)
        assert (pool.block_slots, pool.block_bytes) == (slots, block_mib << 20)


@pytest.mark.parametrize("order", ["token", "layer"])
@pytest.mark.parametrize("v_dim", [None, 32, 0])
@pytest.mark.parametrize("per_slot", [1, 4])
def test_views_do_not_overlap(order: Order, v_dim: int | None, per_slot: int, tmp_path: Path) -> None:
    """Every element of every slot, layer and kind is its own place in memory."""
    layout = memory.KvLayout(
        layers=3, kv_heads=2, head_dim=64, v_head_dim=v_dim, order=order, page_multiple=1, tokens_per_slot=per_slot
    )
    with open_owner(tmp_path) as owner:
        pool = owner.arena(GIB).divide(layout, 200)
        slots = pool.alloc(50)
        rows = (slots[:, None] * per_slot + np.arange(per_slot)).reshape(-1)
        views = memory.numpy_views(pool, np.uint16)
        assert [len(kind) for kind in views] == [3, 0 if v_dim == 0 else 3]
        stamp = 0
        for kind in views:
            for view in kind:
                assert view.shape == (pool.rows, 2, view.shape[2])
                stamp += 1
                view[rows] = stamp
        seen = [int(view[rows].min()) for kind in views for view in kind] + [
            int(v[rows].max()) for k in views for v in k
        ]
        assert seen == list(range(1, stamp + 1)) * 2


def test_torch_views_share_memory_with_numpy_views(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layout = memory.KvLayout(layers=2, kv_heads=2, head_dim=64)
    with open_owner(tmp_path) as owner:
        pool = owner.arena(GIB).divide(layout, 1000)
        slots = torch.from_numpy(pool.alloc(100))
        k, v = memory.torch_views(pool, torch.float16)
        k[1][slots] = 1.5
        v[0][slots] = 2.5
        nk, nv = memory.numpy_views(pool, np.float16)
        assert (nk[1][slots.numpy()] == 1.5).all() and (nv[0][slots.numpy()] == 2.5).all() and not nk[0][slots].any()
        pool.free(slots)
        buffer = torch.empty(10, dtype=torch.int64)
        pool.alloc_into(buffer)
        assert pool.used() == 10 == len(buffer.unique())
        with pytest.raises(errors.BadLayout, match="dtype"):
            memory.torch_views(pool, torch.float32)
        del k, v, nk, nv


def test_cupy_views_share_memory_with_the_device(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CuPy on a GPU; on a host device numpy stands in for it, which has the calls that are used."""
    if bed.kind == FAKE:
        pytest.skip("CuPy knows that the fake is no GPU")
    if bed.kind == CUDA:
        cupy = pytest.importorskip("cupy")
    else:
        cupy = np
        monkeypatch.setitem(sys.modules, "cupy", np)
    with bed.device.register("cupy") as owner:
        pool = owner.arena(64 * bed.page_bytes).divide(bed.layout(), 500)
        slots = pool.alloc(40)
        k, v = memory.cupy_views(pool, cupy.uint16)
        k[1][cupy.asarray(slots)] = 0x4241
        v[0][cupy.asarray(slots)] = 0x4443
        for view, content in ((memory.row_views(pool)[0][1], b"AB"), (memory.row_views(pool)[1][0], b"CD")):
            address = pool.address + 2 * (view.start + int(slots[7]) * view.row)
            assert bed.read(address, 2 * view.heads * view.dim) == content * (view.heads * view.dim)
        del k, v


@given(
    layout=layouts,
    field=st.sampled_from(["layers", "kv_heads", "head_dim", "page_multiple", "tokens_per_slot", "dtype_bytes"]),
    value=st.integers(-5, 0) | st.integers(1 << 20, 1 << 40),
)
@settings(max_examples=60, deadline=None)
def test_impossible_sizes_are_refused(layout: memory.KvLayout, field: str, value: int) -> None:
    with tempfile.TemporaryDirectory() as directory, open_owner(Path(directory)) as owner:
        with pytest.raises(errors.BadLayout):
            owner.arena(GIB).divide(replace(layout, **{field: value}), 100)
        assert owner.leased_bytes == 0


def test_a_layout_that_does_not_fit_leaves_the_old_pool(tmp_path: Path) -> None:
    with open_owner(tmp_path) as owner:
        arena = owner.arena(16 * PAGE)
        pool = arena.divide(memory.KvLayout(layers=2, kv_heads=2, head_dim=64), 100)
        slots = pool.alloc(50)
        with pytest.raises(errors.BadLayout) as caught:
            arena.divide(memory.KvLayout(layers=2, kv_heads=2, head_dim=64), 100_000)
        assert caught.value.numbers["virtual_bytes"] == 16 * PAGE
        pool.free(slots)


def test_groups_of_a_hybrid_model_lie_side_by_side(tmp_path: Path) -> None:
    full = memory.KvLayout(layers=2, kv_heads=2, head_dim=64)
    window = memory.KvLayout(layers=6, kv_heads=2, head_dim=64)
    with open_owner(tmp_path) as owner:
        arena = owner.arena(GIB)
        a, b = arena.divide_groups([(full, 1000, None), (window, 300, 8 * PAGE)])
        assert b.regions[0][0] >= a.regions[0][0] + a.virtual_bytes
        ka, kb = memory.numpy_views(a, np.uint16)[0][0], memory.numpy_views(b, np.uint16)[0][5]
        sa, sb = a.alloc(200), b.alloc(100)
        ka[sa], kb[sb] = 7, 9
        assert (ka[sa] == 7).all() and (kb[sb] == 9).all()
        one = arena.divide(full, 500)
        assert not a.is_open and not b.is_open and one.is_open
        del ka, kb
