"""Sequences with states (Mamba, linear attention) leave a real tree of SGLang's and come back into another one, over
its pools of states and Prism's memory: whatever is found there has the rows of its tokens and the state behind its end,
and no slot is lost. Kernels need a GPU: what they would write is written here."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import warnings
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import memory
from prism.engine import boot, cuda_stub
from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.memory import GroupKind, KvGroup
from prism.memory.rows import HostPoolRows
from tests.kv.stored import spoil, stored
from tests.sglang_patches.keeping_tree import keep_what_is_dropped
from tests.sglang_patches.test_kv_states import LAYERS, params

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
PAGE, SIZE, STATES = 65536, 1024, 40
LAYOUT = memory.KvLayout(layers=1, kv_heads=1, head_dim=32, dtype_bytes=2)
SEAT: list[Any] = []
"""Of the engine that is being made."""


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """SGLang's pools and allocators are Prism's, as in an engine, and what its tree is about to drop is kept."""
    boot.prepare_environment("host")
    cuda_stub.load()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache import memory_pool
        from sglang.srt.mem_cache.unified_cache_components import mamba_component

        from sglang_patches import kv_states

        make = memory_pool.MambaPool.__init__
        patch.setattr(memory_pool, "build_page_major_mamba_views", kv_states.state_views)
        patch.setattr(memory_pool, "MambaSlotAllocator", kv_states.ElasticStateAllocator)
        patch.setattr(memory_pool.MambaPool, "__init__", lambda self, **kw: kv_states.make_states(make, self, **kw))
        patch.setattr(kv_states, "current_seat", lambda: SEAT[-1])
        patch.setattr(mamba_component, "get_server_args", lambda: SimpleNamespace(mamba_cache_chunk_size=64))
        keep_what_is_dropped(patch, mamba_component.MambaComponent)
        yield


class Engine:
    """A tree, its allocators and pools, and as much of a scheduler as moving looks at."""

    def __init__(self, folder: Path, name: str, pool: HostPool) -> None:
        from sglang_patches.kv_move import moves_of, store_of

        device = memory.open_device("host:0", 128 * PAGE, account_dir=folder / name, page_bytes=PAGE)
        owner = device.register("engine")
        self.seat = SimpleNamespace(
            device=device, owner=owner, world=1, fair=False, kv=KvKeeper(pool, "weights", 1.0), draft_rows=None
        )
        self.seat.kv_groups, self.seat.kv_arenas = [], [owner.arena(128 * PAGE)]
        SEAT[:] = [self.seat]
        self.table = self._table()
        self.states, (self.state_group,) = self.table.mamba_allocator, self.seat.kv_groups
        self.tree, self.allocator = self._tree()
        assert self.state_group.pool.ensure(STATES - 2) and self.allocator.group.pool.ensure(SIZE - 1)
        self.token_rows, self.state_rows = (HostPoolRows(g.pool) for g in (self.allocator.group, self.state_group))
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.table,
            server_args=SimpleNamespace(prism_seat=self.seat),
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            chunked_req=None,
        )
        self.store = store_of(self.tree)
        assert self.store is not None
        self.moves = moves_of(self.scheduler, self.store)

    def _table(self) -> Any:
        from sglang.srt.mem_cache import memory_pool

        return memory_pool.HybridReqToTokenPool(
            size=4,
            mamba_size=STATES,
            mamba_spec_state_size=4,
            max_context_len=256,
            device="cpu",
            enable_memory_saver=False,
            cache_params=params((2, 4, 8)),
            mamba_layer_ids=list(LAYERS),
            enable_mamba_extra_buffer=False,
            enable_overlap_schedule=False,
        )

    def _tree(self) -> tuple[Any, Any]:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sglang_patches import kv_allocator, kv_states
        from sglang_patches.kv_move_states import STATES as PARTS

        pool = self.seat.owner.arena(64 * PAGE).divide(LAYOUT, max_tokens=SIZE, lease_bytes=0)
        group = KvGroup(GroupKind.TOKENS, pool, SIZE - 1)
        self.seat.kv_groups.append(group)
        kvcache = SimpleNamespace(prism_group=group, prism_pool=pool, prism_seat=self.seat)
        allocator = kv_allocator.ElasticTokenAllocator(SIZE - 1, None, "cpu", kvcache, False)
        pools = SimpleNamespace(req_to_token_pool=self.table, token_to_kv_pool_allocator=allocator)
        kv_states.join_lease(pools, self.seat)
        made = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=allocator,
            page_size=1,
            tree_components=PARTS,
        )
        return UnifiedRadixCache(made), allocator

    def match(self, tokens: Sequence[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def answer(self, tokens: Sequence[int]) -> None:
        """A request with these tokens comes, is computed behind what is found of it, and ends."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.match(tokens).device_indices
        if len(found) == len(tokens):
            return
        self.evict(len(tokens), 1)
        found = self.match(tokens).device_indices
        slots, state = self.allocator.alloc(len(tokens) - len(found)), self.states.alloc(1)
        self.write(tokens, len(found), slots.tolist(), int(state[0]))
        key, value = RadixKey(array("q", tokens)), torch.cat([found, slots])
        made = InsertParams(key=key, value=value, prev_prefix_len=len(found), mamba_value=state)
        if self.tree.insert(made).mamba_exist:
            self.states.free(state)

    def write(self, tokens: Sequence[int], have: int, slots: Sequence[int], state: int) -> None:
        for i, slot in enumerate(slots):
            put(self.token_rows, slot, content("token", tokens[: have + i + 1], self.token_rows))
        put(self.state_rows, state, content("state", tokens, self.state_rows))

    def bring(self, tokens: Sequence[int]) -> int:
        """What of ``tokens`` is in the tree after what is stored was brought; all of it is looked at."""
        from sglang_patches.kv_move_states import state_of

        self.moves._look_for(SimpleNamespace(rid="r", extra_key=None), array("q", tokens), running=False)
        found = self.match(tokens)
        slots = found.device_indices.tolist()
        for end, slot in enumerate(slots, 1):
            assert np.array_equal(got(self.token_rows, slot), content("token", tokens[:end], self.token_rows))
        if slots:
            state = state_of(found.best_match_node)
            assert state is not None
            there = got(self.state_rows, int(state[0]))
            assert np.array_equal(there, content("state", tokens[: len(slots)], self.state_rows))
        return len(slots)

    def evict(self, tokens: int, states: int) -> None:
        """As many as are missing."""
        from sglang_patches.kv_lease import evict

        for part, wanted in zip(self.allocator.lease.parts, (tokens, states), strict=True):
            if (missing := wanted - part.available()) > 0:
                evict(self.scheduler, missing, part)

    def drop(self, tokens: int, states: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=tokens, mamba_num=states))

    def check(self) -> None:
        """Every slot that is in use is in the tree once."""
        from sglang_patches.kv_move_states import states_behind

        self.tree.sanity_check()
        for found, group in (
            (self.tree.all_values_flatten(), self.allocator.group),
            (self.tree.all_mamba_values_flatten(), self.state_group),
        ):
            slots = found.tolist()
            assert len(set(slots)) == len(slots) == group.pool.used()
            group.pool.check()
        assert not states_behind(self.tree)

    def leave(self) -> None:
        from sglang_patches.kv_move import keep_all

        keep_all(self.scheduler)
        self.check()


def content(kind: str, tokens: Sequence[int], rows: HostPoolRows) -> Any:
    """The row of the last of ``tokens``, or the state behind it."""
    made = hashlib.blake2b(f"{kind}{list(tokens)}".encode(), digest_size=64).digest()
    return np.resize(np.frombuffer(made, dtype=np.uint8), rows.columns[0].width)


def put(rows: HostPoolRows, row: int, data: Any) -> None:
    rows.scatter(0, np.array([row], dtype=np.int64), data)


def got(rows: HostPoolRows, row: int) -> Any:
    found = np.empty(rows.columns[0].width, dtype=np.uint8)
    rows.gather(0, np.array([row], dtype=np.int64), found)
    return found


def said(number: int, count: int) -> list[int]:
    """Sequences 0 and 1 have 90 tokens in common, 2 and 3 begin alike up to 30."""
    apart = {0: 0, 1: 90, 2: 0, 3: 30}[number]
    return [(7 * (number // 2) + i if i < apart or number % 2 == 0 else 500 + i) % 800 for i in range(count)]


@pytest.fixture
def pool(tmp_path: Path) -> HostPool:
    return HostPool(tmp_path / "pool", 1 << 26)


def test_a_conversation_comes_back_to_its_end_and_goes_on(tmp_path: Path, pool: HostPool) -> None:
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    one.answer(said(0, 150))
    one.leave()
    assert two.bring(said(0, 200)) == 150
    assert two.allocator.group.pool.used() == 150 and two.state_group.pool.used() == 1
    two.answer(said(0, 200))
    two.check()


def test_every_point_with_a_state_comes_back_and_no_other(tmp_path: Path, pool: HostPool) -> None:
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    for count in (90, 150):
        one.answer(said(0, count))
    one.leave()
    assert two.bring(said(1, 150)) == 90, "where the first request ended"
    other = Engine(tmp_path, "three", pool)
    assert other.bring(said(0, 120)) == 90, "of the tokens behind it there are rows, but no state"
    other.check()


def test_states_that_go_alone_are_kept(tmp_path: Path, pool: HostPool) -> None:
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    for count in (90, 150):
        one.answer(said(0, count))
    one.drop(0, 1)
    assert len(one.match(said(0, 100)).device_indices) == 0, "its state is gone, its tokens are not"
    assert one.bring(said(0, 100)) == 0, "tokens were not stored yet"
    one.leave()
    assert two.bring(said(0, 100)) == 90
    two.check()


def test_a_running_requests_state_leaves_with_its_tokens(tmp_path: Path, pool: HostPool) -> None:
    from sglang_patches.kv_move import keep_retracted

    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    tokens = said(0, 140)
    slots, state = one.allocator.alloc(140), one.states.alloc(1)
    one.write(tokens, 0, slots.tolist(), int(state[0]))
    one.table.req_to_token[1, :140] = slots
    req = SimpleNamespace(
        rid="r",
        origin_input_ids=array("q", tokens),
        output_ids=array("q", [5]),
        req_pool_idx=1,
        mamba_pool_idx=state[0],
        extra_key=None,
        input_embeds=None,
        cache_protected_len=0,
        finished=lambda: False,
        effective_kv_committed_len=lambda: 140,
    )
    keep_retracted(req=req, req_to_token_pool=one.table, tree_cache=one.tree)
    one.allocator.free(slots)
    one.states.free(state)
    one.leave()
    assert two.bring([*tokens, 5]) == 140
    two.check()


def test_a_state_that_is_corrupt_is_computed_again(tmp_path: Path, pool: HostPool) -> None:
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    one.answer(said(0, 150))
    one.leave()
    width = one.state_rows.columns[0].width
    (broken,) = [piece for piece in stored(pool) if piece.nbytes == 4096 + width]
    spoil(pool, broken)
    assert two.bring(said(0, 200)) == 0 and broken.name not in [piece.name for piece in stored(pool)]
    two.check()


steps = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 3), st.integers(1, 200)),
    st.tuples(st.just("drop"), st.integers(0, 300), st.integers(0, 3)),
    st.tuples(st.just("bring"), st.integers(0, 3), st.integers(1, 200)),
    st.tuples(st.just("leave"), st.just(0), st.just(0)),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(steps, min_size=2, max_size=14))
def test_whatever_is_found_is_right(story: list[tuple[str, int, int]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="prism-s-"))
    try:
        pool, number = HostPool(folder / "pool", 1 << 26), 0
        engine = Engine(folder, "0", pool)
        for what, which, count in story:
            match what:
                case "answer":
                    engine.answer(said(which, count))
                case "drop":
                    engine.drop(which, count)
                case "bring":
                    engine.bring(said(which, count))
                case "leave":
                    engine.leave()
                    number += 1
                    engine = Engine(folder, str(number), pool)
            engine.check()
        engine.leave()
        use = pool.use()
        assert use.booked_bytes == use.file_bytes
    finally:
        shutil.rmtree(folder)
