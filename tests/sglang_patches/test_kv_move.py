"""What SGLang's tree is about to drop, seen beforehand; requests that wait for their KV keep their places."""

from __future__ import annotations

import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.engine import boot, cuda_stub

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and torch warn of many things when they are imported


def radix() -> Any:
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache import base_prefix_cache, radix_cache, unified_radix_cache
    return SimpleNamespace(**{**vars(base_prefix_cache), **vars(unified_radix_cache), **vars(radix_cache)})


class Slots:
    """An allocator that remembers what was given back."""

    device = "cpu"

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, slots: Any) -> None:
        self.freed += slots.tolist()


def grow(sgl: Any, tree: Any, sequences: list[list[int]]) -> dict[tuple[int, ...], int]:
    """Insert the sequences; the slot of each prefix's last token."""
    import torch

    slot_of: dict[tuple[int, ...], int] = {}
    for tokens in sequences:
        for end in range(1, len(tokens) + 1):
            slot_of.setdefault(tuple(tokens[:end]), len(slot_of) + 1)
        slots = torch.tensor([slot_of[tuple(tokens[:end])] for end in range(1, len(tokens) + 1)], dtype=torch.int64)
        tree.insert(sgl.InsertParams(key=sgl.RadixKey(array("q", tokens)), value=slots))
    return slot_of


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


@given(sequences, st.integers(1, 30), st.integers(0, 7), st.booleans())
def test_what_is_about_to_be_evicted_is_known(grown: list[list[int]], count: int, lock: int, locks: bool) -> None:
    from sglang_patches.kv_move_paths import evicted_paths

    sgl, slots = radix(), Slots()
    tree = sgl.RadixCache.create_simulated(mock_allocator=slots)
    slot_of = grow(sgl, tree, grown)
    if locks:
        kept = array("q", grown[lock % len(grown)])
        tree.inc_lock_ref(tree.match_prefix(sgl.MatchPrefixParams(key=sgl.RadixKey(kept))).last_device_node)
    going: list[int] = []
    for tokens, rows, adapter, first in evicted_paths(tree, count):
        assert adapter is None and rows.dtype == np.int64
        assert rows.tolist() == [slot_of[tuple(tokens[:end])] for end in range(1, len(tokens) + 1)]
        going += rows[first:].tolist()
    tree.evict(sgl.EvictParams(num_tokens=count))
    assert set(going) == set(slots.freed)


def test_what_cannot_move_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    sgl = radix()
    from sglang_patches.kv_move import store_of, tell_stays
    from sglang_patches.kv_move_trees import why_stays

    plain = sgl.RadixCache.create_simulated(mock_allocator=Slots())
    assert why_stays(plain) == ""
    kinds = {"SWARadixCache": "another kind", "ChunkCache": "disable_radix_cache", "HiRadixCache": "another kind"}
    trees = [(type(name, (), {})(), words) for name, words in kinds.items()]
    states = object.__new__(sgl.UnifiedRadixCache)
    states.disable, states.tree_components = False, (sgl.ComponentType.FULL, sgl.ComponentType.MAMBA)
    states.req_to_token_pool = SimpleNamespace(mamba_ckpt_pool=object())
    trees.append((states, "another form"))
    for change, words in (("disable", "no tree"), ("is_eagle", "pairs"), ("page_size", "page_size 16")):
        tree = sgl.RadixCache.create_simulated(mock_allocator=Slots())
        setattr(tree, change, 16 if change == "page_size" else True)
        trees.append((tree, words))
    seat = SimpleNamespace(kv=object(), fair=True)
    for tree, words in trees:
        assert words in why_stays(tree) and store_of(tree) is None
        scheduler = SimpleNamespace(tree_cache=tree, server_args=SimpleNamespace(prism_seat=seat))
        caplog.clear()
        for _ in range(3):
            tell_stays(scheduler)
        (told,) = caplog.messages
        assert words in told and "order of arrival" in told


@given(st.lists(st.integers(0, 9), unique=True), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_requests_whose_kv_is_coming_keep_their_places(queue: list[int], held: set[int], taken: set[int]) -> None:
    radix()
    from sglang_patches.kv_move_in import without

    scheduler = SimpleNamespace(waiting_queue=[SimpleNamespace(rid=str(i)) for i in queue])

    def admit() -> str:
        assert not {r.rid for r in scheduler.waiting_queue} & {str(i) for i in held}
        left = [r for r in scheduler.waiting_queue if int(r.rid) not in taken]
        scheduler.waiting_queue = [*left, SimpleNamespace(rid="new")]
        return "plan"

    assert without(scheduler, dict.fromkeys(map(str, held)), admit) == "plan"
    expected = [str(i) for i in queue if i in held or i not in taken]
    assert [r.rid for r in scheduler.waiting_queue] == [*expected, "new"]
