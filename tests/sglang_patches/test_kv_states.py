"""States of Mamba and linear attention: SGLang's own pools, allocator and prefix cache on elastic slots. Its kernels
need a GPU and are left out: what they would write is written here."""

from __future__ import annotations

import warnings
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prism import memory
from prism.engine import boot, cuda_stub
from prism.memory import GroupKind

pytestmark = pytest.mark.engine
PAGE_BYTES, PAGES = 65536, 64
LAYERS = (0, 2, 3)
STATES, REQUESTS = 24, 6


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache import memory_pool

        from sglang_patches import kv_allocator, kv_states
    original = memory_pool.MambaPool.__init__
    monkeypatch.setattr(memory_pool, "build_page_major_mamba_views", kv_states.state_views)
    monkeypatch.setattr(memory_pool, "MambaSlotAllocator", kv_states.ElasticStateAllocator)
    monkeypatch.setattr(
        memory_pool.MambaPool, "__init__", lambda self, **kwargs: kv_states.make_states(original, self, **kwargs)
    )
    return SimpleNamespace(pools=memory_pool, states=kv_states, allocators=kv_allocator)


@pytest.fixture
def seat(tmp_path: Path, modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    device = memory.open_device("host:0", PAGES * PAGE_BYTES, account_dir=tmp_path, page_bytes=PAGE_BYTES)
    owner = device.register("states")
    made = SimpleNamespace(
        device=device,
        owner=owner,
        world=1,
        kv_groups=[],
        draft_rows=None,
        kv_arenas=[owner.arena(4 * PAGES * PAGE_BYTES)],
    )
    monkeypatch.setattr(modules.states, "current_seat", lambda: made)
    return made


def params(temporal: tuple[int, ...] = (4, 32, 40)) -> Any:
    import torch

    return SimpleNamespace(
        shape=SimpleNamespace(conv=[(96, 3), (32, 3)], temporal=temporal, disable_conv_window_dedup=False),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
        layers=list(LAYERS),
        is_kda=False,
    )


def request(tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(req_pool_idx=None, mamba_pool_idx=None, mamba_needs_clear=False)


@pytest.fixture
def table(modules: SimpleNamespace, seat: SimpleNamespace) -> Any:
    """SGLang's table of requests with its pool of states."""
    return modules.pools.HybridReqToTokenPool(
        size=REQUESTS,
        mamba_size=STATES,
        mamba_spec_state_size=REQUESTS,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params(),
        mamba_layer_ids=list(LAYERS),
        enable_mamba_extra_buffer=False,
        enable_overlap_schedule=False,
    )


def tensors(table: Any) -> list[Any]:
    cache = table.mamba_pool.mamba_cache
    return [*cache.conv, cache.temporal]


def test_every_tensor_of_every_slot_has_its_place(table: Any, seat: SimpleNamespace) -> None:
    import torch

    (group,) = seat.kv_groups
    assert group.kind is GroupKind.STATES and group.token_bytes == 0
    assert [tuple(t.shape[2:]) for t in tensors(table)] == [(96, 3), (32, 3), (4, 32, 40)]
    assert group.pool.ensure(STATES)
    slots = group.pool.alloc(STATES)
    number = 0
    for slot in slots.tolist():
        for tensor in tensors(table):
            for layer in range(len(LAYERS)):
                number += 1
                tensor[layer, slot] = number % 250
    number = 0
    for slot in slots.tolist():
        for tensor in tensors(table):
            for layer in range(len(LAYERS)):
                number += 1
                assert torch.all(tensor[layer, slot] == number % 250)
    table.mamba_pool.clear_slots(torch.tensor(slots[:2]))
    table.mamba_pool.copy_from(torch.tensor(slots[3:4]), torch.tensor(slots[4:5]))
    for tensor in tensors(table):
        assert not tensor[:, slots[:2].tolist()].any() and tensor[:, int(slots[2])].all()
        assert torch.equal(tensor[:, int(slots[3])], tensor[:, int(slots[4])])


def test_states_come_with_requests_and_their_pages_go_with_them(table: Any, seat: SimpleNamespace) -> None:
    (group,) = seat.kv_groups
    allocator = table.mamba_allocator
    assert allocator.available_size() == STATES and allocator.schedulable_available_size() < 2
    assert allocator.alloc(2) is None, "not covered by the lease"
    assert group.pool.ensure(REQUESTS)
    requests = [request() for _ in range(4)]
    assert table.alloc(requests) == [1, 2, 3, 4]
    assert len({int(r.mamba_pool_idx) for r in requests}) == 4 and allocator.available_size() == STATES - 4
    mapped = group.pool.stats()["mapped_bytes"]
    for r in requests:
        table.free_mamba_cache(r)
    group.pool.trim()
    group.pool.quiesce()
    assert allocator.available_size() == STATES and group.pool.stats()["mapped_bytes"] < mapped
    group.pool.check()


class Engine:
    """SGLang's prefix cache over tokens and states, a lease over both, and as much of its scheduler as that looks
    at."""

    def __init__(self, modules: SimpleNamespace, seat: SimpleNamespace, table: Any) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache_components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        size = 512
        layout = memory.KvLayout(layers=1, kv_heads=2, head_dim=64)
        pool = seat.owner.arena(4 << 20).divide(layout, max_tokens=size, lease_bytes=0)
        group = memory.KvGroup(GroupKind.TOKENS, pool, size)
        seat.kv_groups.append(group)
        kvcache = SimpleNamespace(prism_group=group, prism_seat=seat)
        self.tokens = modules.allocators.ElasticTokenAllocator(size, None, "cpu", kvcache, False)
        self.table, self.states = table, table.mamba_allocator
        pools = SimpleNamespace(req_to_token_pool=table, token_to_kv_pool_allocator=self.tokens)
        modules.states.join_lease(pools, seat)
        parts = (ComponentType.FULL, ComponentType.MAMBA)
        self.tree_cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=table,
                token_to_kv_pool_allocator=self.tokens,
                page_size=1,
                tree_components=parts,
            )
        )
        self.running_batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.last_batch = self.chunked_req = None
        self.max_running_requests, self.chunked_prefill_size = REQUESTS, 64
        self.waiting_queue: list[Any] = []
        self.new_token_ratio_tracker = SimpleNamespace(current=1.0)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)

    def wait(self, count: int) -> None:
        self.waiting_queue = [
            SimpleNamespace(
                rid=str(i),
                origin_input_ids=[0] * 16,
                output_ids=[],
                prefix_indices=[],
                sampling_params=SimpleNamespace(max_new_tokens=4),
            )
            for i in range(count)
        ]

    def cache(self, first: int, count: int = 8) -> None:
        """A finished request's prefix and its state."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", [first, *range(100, 99 + count)]), None)
        slots, state = self.tokens.alloc(count), self.states.alloc(1)
        assert slots is not None and state is not None
        self.tree_cache.insert(InsertParams(key=key, value=slots, mamba_value=state))


@pytest.fixture
def engine(modules: SimpleNamespace, seat: SimpleNamespace, table: Any) -> Engine:
    return Engine(modules, seat, table)


def test_states_of_waiting_requests_are_leased_before_they_start(engine: Engine, seat: SimpleNamespace) -> None:
    assert not engine.states.room_for_one(engine.tree_cache)
    engine.wait(3)
    engine.tokens.lease.before_step(engine)
    assert engine.states.schedulable_available_size() >= 9 and engine.tokens.available_size() >= 3 * 22
    assert engine.states.room_for_one(engine.tree_cache) and seat.owner.wished_bytes == 0


def test_cached_states_go_when_others_wait(engine: Engine, seat: SimpleNamespace) -> None:
    engine.wait(4)
    engine.tokens.lease.before_step(engine)
    for first in range(6):
        engine.cache(first)
    engine.wait(0)
    engine.tokens.lease.rest(engine)
    assert engine.tree_cache.mamba_evictable_size() == 6
    other = seat.device.register("other")
    other.wish(seat.device.free_bytes() + 2 * PAGE_BYTES, PAGES * PAGE_BYTES)
    engine.tokens.lease.rest(engine)
    assert engine.tree_cache.mamba_evictable_size() < 6
    for group in seat.kv_groups:
        group.pool.check()


def test_a_request_whose_states_are_not_covered_waits(
    modules: SimpleNamespace, engine: Engine, seat: SimpleNamespace
) -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    engine.wait(2)
    engine.tokens.lease.before_step(engine)
    room = engine.states.schedulable_available_size() // 3
    adder = SimpleNamespace(tree_cache=engine.tree_cache, can_run_list=[])

    def add(adder: Any, req: Any, *_: Any) -> AddReqResult:
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    engine.states.alloc_group_begin(2)
    for _ in range(room):
        assert modules.states.admit(add, adder, request(), False, None) is AddReqResult.CONTINUE
    refused = request()
    assert modules.states.admit(add, adder, refused, False, None) is AddReqResult.NO_TOKEN
    assert len(adder.can_run_list) == room
    copied: list[Any] = []
    modules.states.match_without_copy(lambda *args: copied.append(args[2]), refused, engine.tree_cache)
    assert copied == [False], "nor does it take a state for its prefix"
    engine.states.alloc_group_begin(1)
    modules.states.match_without_copy(lambda *args: copied.append(args[2]), refused, engine.tree_cache)
    assert copied == [False, None]


@pytest.mark.parametrize(
    "changes", [{"enable_linear_replayssm": True}, {"speculative_num_draft_tokens": 4}], ids=["replay", "drafts"]
)
def test_states_with_buffers_outside_the_account_are_refused(
    modules: SimpleNamespace, seat: SimpleNamespace, changes: dict[str, Any]
) -> None:
    from sglang_patches.kv_guard import UnsupportedModel

    with pytest.raises(UnsupportedModel, match="states"):
        modules.pools.MambaPool(
            size=4, spec_state_size=4, cache_params=params(), mamba_layer_ids=[0], device="cpu", **changes
        )
    assert seat.kv_groups == []


@pytest.mark.parametrize("nbytes", [75_497_472, 2_100_000, 1_500_000, 300_000, 100_000, 5_000])
def test_slots_of_states_lose_little_to_padding(nbytes: int) -> None:
    page = 2 << 20
    layout = memory.state_layout(nbytes, page)
    assert nbytes <= layout.cell_bytes <= nbytes * 1.15 + 256
