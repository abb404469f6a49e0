"""A request's attention step by step, with all but its tail outside: the same as with everything on the device."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prism import memory
from prism.kv.host_pool import HostPool
from prism.kv.long_store import LongStore, LongTiers
from prism.memory.errors import OutOfMemory
from prism.policy.long_prompts import LongShape, TierVerdict, WindowPlan, plan_window
from sglang_patches.long_attention import Looks
from sglang_patches.long_backend import LongAttention
from sglang_patches.long_run import _why_not_parts
from sglang_patches.long_window import LongWindow
from tests.kv.stored import spoil_claims
from tests.sglang_patches.test_long_attention import whole

LAYERS, HEADS, KV_HEADS, DIM, V_DIM = 3, 4, 2, 16, 8
SHAPE = LongShape(LAYERS, KV_HEADS * (DIM + V_DIM) * 4)
POOL = SimpleNamespace(head_num=KV_HEADS, head_dim=DIM, v_head_dim=V_DIM, dtype=torch.float32, start_layer=0)
STEPS = (40, 40, 23, 1, 1, 1, 1, 1, 1)


@pytest.fixture
def device() -> Iterator[memory.Device]:
    with tempfile.TemporaryDirectory() as folder:
        yield memory.open_device("host:0", 64 << 20, account_dir=folder)


@pytest.fixture
def pool(tmp_path: Path) -> HostPool:
    return HostPool(tmp_path / "pool", 1 << 20)


def small_plan() -> WindowPlan:
    plan = plan_window(SHAPE, SHAPE.token_bytes * 16 * (LAYERS + 2))
    assert plan is not None
    assert plan.piece_tokens == 16
    return plan


def layer(number: int) -> SimpleNamespace:
    return SimpleNamespace(
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=V_DIM,
        layer_id=number,
        scaling=0.25,
        logit_cap=0.0,
    )


def run_steps(
    window: LongWindow,
    store: LongStore,
    steps: tuple[int, ...],
    between: Callable[[LongAttention], None] = lambda backend: None,
    shape: LongShape = SHAPE,
) -> tuple[LongAttention, bool]:
    """Whether every answer is that of one softmax over all tokens so far. ``between`` two steps something happens."""
    torch.manual_seed(1)
    runner = SimpleNamespace(device="cpu", token_to_kv_pool=POOL, req_to_token_pool=None)
    backend = LongAttention(runner, small_plan(), shape, window, store)
    past = [(torch.empty(0, KV_HEADS, DIM), torch.empty(0, KV_HEADS, V_DIM)) for _ in range(LAYERS)]
    equal = True
    for tokens in steps:
        backend.begin()
        for number in range(LAYERS):
            q, k, v = (torch.randn(tokens, h, d) for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM)))
            before = len(past[number][0])
            past[number] = torch.cat([past[number][0], k]), torch.cat([past[number][1], v])
            found = backend.forward_extend(q.view(tokens, -1), k, v, layer(number), None)
            wanted = whole(q, *past[number], before, Looks(0.25, shape.before(number)))
            equal = equal and torch.allclose(found, wanted, atol=1e-5)
        backend.end()
        between(backend)
    return backend, equal


def test_attention_over_units_is_attention_over_everything(device: memory.Device, pool: HostPool) -> None:
    owner = device.register("engine")
    window = LongWindow(owner, small_plan(), LAYERS, POOL)
    assert owner.held("staging") == window.held_bytes >= small_plan().nbytes
    tiers = LongTiers(pool, None, 0.0)
    store = tiers.begin(SHAPE, small_plan(), sum(STEPS))
    assert isinstance(store, LongStore)
    backend, equal = run_steps(window, store, STEPS)
    assert equal
    assert not backend.lost
    assert tiers.brought_bytes > 0
    assert store.host_bytes == SHAPE.bytes_of(sum(STEPS) // 16 * 16) == pool.use().booked_bytes
    backend.close()
    store.close()
    window.close()
    assert pool.use().booked_bytes == 0
    assert device.free_bytes() == device.capacity_bytes
    assert not device.audit().problems
    owner.close()


@pytest.mark.parametrize("sees", [(1, 0, 16), (15, 33, 0), (40, 20, 17)])
@pytest.mark.parametrize("goes", [False, True])
def test_layers_that_see_the_last_tokens_only_keep_no_others(
    device: memory.Device, pool: HostPool, sees: tuple[int, ...], goes: bool
) -> None:
    """Whether or not the window goes between the steps."""
    shape = LongShape(LAYERS, SHAPE.token_bytes, sees)
    owner = device.register("engine")
    windows = [LongWindow(owner, small_plan(), LAYERS, POOL)]
    tiers = LongTiers(pool, None, 0.0)
    store = tiers.begin(shape, small_plan(), sum(STEPS))
    assert isinstance(store, LongStore)
    claimed = store.host_bytes
    assert (
        claimed == shape.units(sum(STEPS) // 16, 16) * small_plan().unit_bytes < SHAPE.bytes_of(sum(STEPS) // 16 * 16)
    )

    def change(backend: LongAttention) -> None:
        if goes:
            assert backend.put_tails_away()
            windows[-1].close()
            windows.append(LongWindow(owner, small_plan(), LAYERS, POOL))
            backend.bring_tails(windows[-1])

    backend, equal = run_steps(windows[0], store, STEPS, change, shape)
    assert equal
    assert not backend.lost
    assert goes or store.host_bytes == claimed, "what was out of sight made room"
    tails = LAYERS if goes else 0
    assert len(store._sums) <= shape.units(sum(STEPS) // 16, 16) + tails
    assert len(store._sums) == len(store._places)
    backend.close()
    store.close()
    windows[-1].close()
    owner.close()
    assert pool.use().booked_bytes == 0


def test_latent_rows_are_stored_once_and_attended_as_keys_and_values(device: memory.Device, pool: HostPool) -> None:
    """MLA: one row for all heads, whose values are a part of its key."""
    latent = SimpleNamespace(kv_cache_dim=DIM, kv_lora_rank=V_DIM, dtype=torch.float32, start_layer=0)
    shape = LongShape(LAYERS, DIM * 4)
    plan = plan_window(shape, shape.token_bytes * 16 * (LAYERS + 2))
    assert plan is not None
    owner = device.register("engine")
    window = LongWindow(owner, plan, LAYERS, latent)
    store = LongTiers(pool, None, 0.0).begin(shape, plan, sum(STEPS))
    assert isinstance(store, LongStore)
    runner = SimpleNamespace(device="cpu", token_to_kv_pool=latent, req_to_token_pool=None)
    backend = LongAttention(runner, plan, shape, window, store)
    attends = [SimpleNamespace(**{**vars(layer(i)), "tp_k_head_num": 1, "tp_v_head_num": 1}) for i in range(LAYERS)]
    past = [torch.empty(0, 1, DIM) for _ in range(LAYERS)]
    torch.manual_seed(1)
    for tokens in STEPS:
        backend.begin()
        for number in range(LAYERS):
            q, rows = torch.randn(tokens, HEADS, DIM), torch.randn(tokens, 1, DIM)
            before = len(past[number])
            past[number] = torch.cat([past[number], rows])
            found = backend.forward_extend(q.view(tokens, -1), rows, rows[..., :V_DIM], attends[number], None)
            wanted = whole(q, past[number], past[number][..., :V_DIM], before, Looks(0.25))
            assert torch.allclose(found, wanted, atol=1e-5)
        backend.end()
    assert not backend.lost
    assert store.host_bytes == shape.bytes_of(sum(STEPS) // 16 * 16), "keys alone"
    backend.close()
    store.close()
    window.close()
    owner.close()


def test_a_unit_that_is_not_what_was_stored_costs_the_step(device: memory.Device, pool: HostPool) -> None:
    owner = device.register("engine")
    window = LongWindow(owner, small_plan(), LAYERS, POOL)
    store = LongTiers(pool, None, 0.0).begin(SHAPE, small_plan(), 120)
    assert isinstance(store, LongStore)
    backend, _ = run_steps(window, store, (40,))
    assert not backend.lost
    spoil_claims(pool)
    backend.begin()
    for number in range(LAYERS):
        parts = torch.ones(1, HEADS * DIM), torch.ones(1, KV_HEADS, DIM), torch.ones(1, KV_HEADS, V_DIM)
        assert not backend.forward_decode(*parts, layer(number), None).isnan().any()
    backend.end()
    assert "not what was stored" in backend.lost
    backend.close()
    store.close()
    window.close()
    owner.close()


def test_a_window_that_finds_no_room_leaves_nothing(device: memory.Device) -> None:
    other = device.register("other")
    other.reserve(64 << 20, "kv")
    owner = device.register("engine")
    with pytest.raises(OutOfMemory):
        LongWindow(owner, small_plan(), LAYERS, POOL)
    assert owner.held("staging") == 0
    owner.close()
    other.close()


def test_what_the_pool_cannot_hold_is_told_with_numbers(pool: HostPool) -> None:
    found = LongTiers(pool, None, 0.0).begin(SHAPE, small_plan(), 10_000)
    assert isinstance(found, TierVerdict)
    assert not found.may_fit
    assert "host memory 1.0 MiB" in found.words()


def test_a_window_that_goes_between_steps_takes_nothing_with_it(device: memory.Device, pool: HostPool) -> None:
    owner = device.register("engine")
    windows = [LongWindow(owner, small_plan(), LAYERS, POOL)]
    held_bytes = owner.held("staging")
    store = LongTiers(pool, None, 0.0).begin(SHAPE, small_plan(), sum(STEPS) + 16)
    assert isinstance(store, LongStore)

    def change(backend: LongAttention) -> None:
        assert backend.put_tails_away()
        windows[-1].close()
        assert owner.held("staging") == 0
        windows.append(LongWindow(owner, small_plan(), LAYERS, POOL))
        for number in range(LAYERS):
            for part in windows[-1].tail(number):
                part.fill_(torch.nan)
        backend.bring_tails(windows[-1])

    backend, equal = run_steps(windows[0], store, STEPS, change)
    assert equal
    assert not backend.lost
    assert owner.held("staging") == held_bytes
    backend.close()
    store.close()
    windows[-1].close()
    owner.close()


def test_a_window_whose_tails_find_no_room_stays(device: memory.Device, pool: HostPool) -> None:
    owner = device.register("engine")
    window = LongWindow(owner, small_plan(), LAYERS, POOL)
    store = LongTiers(pool, None, 0.0).begin(SHAPE, small_plan(), 40)
    assert isinstance(store, LongStore)
    backend, equal = run_steps(window, store, (40,))
    assert equal
    full = pool.claim(pool.claimable_bytes())
    assert full is not None
    assert not backend.put_tails_away()
    assert not backend.lost, "it goes on where it is"
    full.close()
    assert backend.put_tails_away()
    backend.close()
    store.close()
    window.close()
    owner.close()


@pytest.mark.parametrize("by", ["torch_native", "triton"])
def test_kv_in_eight_bits_goes_outside_where_attention_only_widens_it(by: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pools, _, _ = (
            import_module(f"sglang.srt.mem_cache.{n}") for n in ("memory_pool", "radix_cache", "swa_memory_pool")
        )
    pool = object.__new__(pools.MHATokenToKVPool)
    pool.dtype, pool.store_dtype = torch.float8_e4m3fn, torch.uint8
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(attention_backend=by, prism_seat=SimpleNamespace(first_pieces=())),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        is_generation=True,
        tree_cache=SimpleNamespace(),  # of no kind that is known: what is asked about last
    )
    refused = "attention by triton rounds queries" in _why_not_parts(scheduler, pool)
    assert refused == (by == "triton")
