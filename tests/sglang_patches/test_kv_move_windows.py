"""Sequences of layers with windows leave a real tree of SGLang's and come back into another one, over pools of Prism's:
whatever is found there has the rows of its tokens and the window before its end, and no slot is lost."""

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
from tests.kv.stored import forget, spoil, stored
from tests.sglang_patches.keeping_tree import keep_what_is_dropped

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and torch warn of many things when they are imported
PAGE, SIZE, WINDOW = 65536, 1024, 24
LAYOUT = memory.KvLayout(layers=1, kv_heads=1, head_dim=32, dtype_bytes=2)


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """SGLang's allocators are Prism's, as in an engine, and what its tree is about to drop is kept."""
    boot.prepare_environment("host")
    cuda_stub.load()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache.allocator import swa
        from sglang.srt.mem_cache.unified_cache_components.swa_component import SWAComponent

        from sglang_patches import kv_allocator

        patch.setattr(swa, "TokenToKVPoolAllocator", kv_allocator.ElasticTokenAllocator)
        keep_what_is_dropped(patch, SWAComponent)
        yield


class Engine:
    """A tree, its allocator and pools, and as much of a scheduler as moving looks at."""

    def __init__(self, folder: Path, name: str, pool: HostPool) -> None:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sglang_patches.kv_lease import KvLease
        from sglang_patches.kv_move import moves_of, store_of
        from sglang_patches.kv_move_trees import WINDOWS

        device = memory.open_device("host:0", 64 * PAGE, account_dir=folder / name, page_bytes=PAGE)
        owner = device.register("engine")
        seat = SimpleNamespace(owner=owner, world=1, fair=False, kv=KvKeeper(pool, "weights", 1.0))
        self.groups = []
        for kind in (GroupKind.TOKENS, GroupKind.WINDOW):
            made = owner.arena(64 * PAGE).divide(LAYOUT, max_tokens=SIZE, lease_bytes=0)
            assert made.ensure(SIZE - 1)
            self.groups.append(KvGroup(kind, made, SIZE - 1))
        full, window = (SimpleNamespace(prism_group=g, prism_pool=g.pool, prism_seat=seat) for g in self.groups)

        class Pools(BaseSWAKVPool):  # type: ignore[misc]
            full_kv_pool, swa_kv_pool, prism_seat = full, window, seat

            def register_mapping(self, table: Any) -> None:
                self.full_to_swa_index_mapping = table

            def translate_loc_from_full_to_swa(self, slots: Any) -> Any:
                return self.full_to_swa_index_mapping[slots]

        Pools.__abstractmethods__ = frozenset()
        self.allocator = SWATokenToKVPoolAllocator(SIZE - 1, SIZE - 1, 1, None, "cpu", object.__new__(Pools), False)
        parts = [self.allocator.full_attn_allocator.part, self.allocator.swa_attn_allocator.part]
        self.allocator.lease = KvLease(parts, seat)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=WINDOWS,
                sliding_window_size=WINDOW,
            )
        )
        self.scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            server_args=SimpleNamespace(prism_seat=seat),
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            chunked_req=None,
        )
        self.store = store_of(self.tree)
        assert self.store is not None
        self.moves = moves_of(self.scheduler, self.store)

    def match(self, tokens: Sequence[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens)))).device_indices

    def answer(self, tokens: Sequence[int], leaves: bool) -> None:
        """A request with these tokens comes, is computed behind what is found of it, and ends; with ``leaves`` what
        left its window is free by then."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.match(tokens)
        have = len(found)
        if (slots := self.allocator.alloc(len(tokens) - have)) is None:
            return
        self.write(tokens, have, slots)
        gone = max(have, len(tokens) - WINDOW) if leaves else 0
        if gone > have:
            self.allocator.free_swa(slots[: gone - have])
        import torch

        key, value = RadixKey(array("q", tokens)), torch.cat([found, slots])
        self.tree.insert(InsertParams(key=key, value=value, prev_prefix_len=have, swa_evicted_seqlen=gone))

    def write(self, tokens: Sequence[int], have: int, slots: Any) -> None:
        windows = self.allocator.full_to_swa_index_mapping[slots]
        for i, (slot, window) in enumerate(zip(slots.tolist(), windows.tolist(), strict=True)):
            for group, place in zip(self.groups, (slot, window), strict=True):
                self.rows(group)[place] = content(group.kind, tokens[: have + i + 1])

    def rows(self, group: KvGroup) -> Any:
        k, _ = memory.numpy_views(group.pool, np.uint16)
        return k[0][:, 0]

    def bring(self, tokens: Sequence[int]) -> int:
        """What of ``tokens`` is in the tree after what is stored was brought; all of it is looked at."""
        self.moves._look_for(SimpleNamespace(rid="r", extra_key=None), array("q", tokens), running=False)
        slots = self.match(tokens)
        windows = self.allocator.full_to_swa_index_mapping[slots]
        for end in range(1, len(slots) + 1):
            assert np.array_equal(self.rows(self.groups[0])[slots[end - 1]], content(GroupKind.TOKENS, tokens[:end]))
            if end > len(slots) - WINDOW:
                assert windows[end - 1] > 0
                there = self.rows(self.groups[1])[windows[end - 1]]
                assert np.array_equal(there, content(GroupKind.WINDOW, tokens[:end]))
        return len(slots)

    def evict(self, tokens: int, windows: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=tokens, swa_num_tokens=windows))

    def check(self) -> None:
        """Every slot that is in use is in the tree once, and a window's slot is that of its token."""
        self.tree.sanity_check()
        full = self.tree.all_values_flatten().tolist()
        windows = [w for w in self.allocator.full_to_swa_index_mapping[full].tolist() if w > 0] if full else []
        assert len(set(full)) == len(full) == self.groups[0].pool.used()
        assert len(set(windows)) == len(windows) == self.groups[1].pool.used()
        for group in self.groups:
            group.pool.check()

    def leave(self) -> None:
        from sglang_patches.kv_move import keep_all

        keep_all(self.scheduler)
        self.check()


def content(kind: GroupKind, tokens: Sequence[int]) -> Any:
    """The row of the last of ``tokens``."""
    made = hashlib.blake2b(f"{kind}{list(tokens)}".encode(), digest_size=64).digest()
    return np.frombuffer(made, dtype=np.uint16)


def said(number: int, count: int) -> list[int]:
    """Sequences 0 and 1 have 90 tokens in common, 2 and 3 begin alike up to 30."""
    apart = {0: 0, 1: 90, 2: 0, 3: 30}[number]
    return [(7 * (number // 2) + i if i < apart or number % 2 == 0 else 500 + i) % 800 for i in range(count)]


@pytest.fixture
def pool(tmp_path: Path) -> HostPool:
    return HostPool(tmp_path / "pool", 1 << 26)


def test_a_conversation_comes_back_to_its_end_and_goes_on(tmp_path: Path, pool: HostPool) -> None:
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    one.answer(said(0, 150), leaves=True)
    one.leave()
    assert two.bring(said(0, 200)) == 150
    assert two.groups[0].pool.used() == 150 and two.groups[1].pool.used() == WINDOW, "windows of the last tokens only"
    two.answer(said(0, 200), leaves=True)
    two.check()


def test_sequences_that_go_apart_share_whole_pieces_before(tmp_path: Path, pool: HostPool) -> None:
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    one.answer(said(0, 90), leaves=False)
    one.answer(said(0, 150), leaves=True)
    one.leave()
    assert two.bring(said(1, 150)) == 0, "nothing was known of where they would go apart"
    one.evict(SIZE, 0)
    one.answer(said(0, 150), leaves=True)
    one.answer(said(1, 150), leaves=True)
    one.evict(SIZE, 0)
    one.leave()  # what is on its way is stored then
    assert two.bring(said(1, 150)) == 150


def test_a_window_that_is_corrupt_is_computed_again(tmp_path: Path, pool: HostPool) -> None:
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    one.answer(said(0, 150), leaves=True)
    one.leave()
    (broken,) = [piece for piece in stored(pool, 2) if piece.nbytes == 4096 + WINDOW * 128]
    spoil(pool, broken)
    assert two.bring(said(0, 200)) == 0 and broken.name not in [piece.name for piece in stored(pool)]
    two.check()


def test_a_window_of_many_bytes_is_stored_in_parts(
    tmp_path: Path, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prism.kv.points._PART_BYTES", 10 * 128)
    one, two = Engine(tmp_path, "one", pool), Engine(tmp_path, "two", pool)
    one.answer(said(0, 150), leaves=True)
    one.leave()
    parts = [piece for piece in stored(pool, 2) if piece.nbytes <= 4096 + 10 * 128]
    assert len(parts) == 3
    assert two.bring(said(0, 200)) == 150
    other = Engine(tmp_path, "other", pool)
    other.answer(said(0, 140), leaves=False)
    assert other.bring(said(0, 150)) == 150, "of the first part it needs nothing: those tokens' windows are there"
    forget(pool, parts[1])
    assert Engine(tmp_path, "three", pool).bring(said(0, 200)) == 0, "a part is missing"


steps = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 3), st.integers(1, 200), st.booleans()),
    st.tuples(st.just("evict"), st.integers(0, 300), st.integers(0, 100), st.just(False)),
    st.tuples(st.just("bring"), st.integers(0, 3), st.integers(1, 200), st.just(False)),
    st.tuples(st.just("leave"), st.just(0), st.just(0), st.just(False)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, min_size=2, max_size=14))
def test_whatever_is_found_is_right(story: list[tuple[str, int, int, bool]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="prism-w-"))
    try:
        pool, number = HostPool(folder / "pool", 1 << 26), 0
        engine = Engine(folder, "0", pool)
        for what, which, count, leaves in story:
            match what:
                case "answer":
                    engine.answer(said(which, count), leaves)
                case "evict":
                    engine.evict(which, count)
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
