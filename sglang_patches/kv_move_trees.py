"""SGLang's two kinds of trees whose KV moves, as far as what moves differs.

========================  ==========================================================================
plain (``RadixCache``)    a token has one slot
windows                   a token has a slot in the layers that see everything, and while it is in a
(``UnifiedRadixCache``)   window one of another pool; the allocator's table leads from one to the other
========================  ==========================================================================

In a tree with windows a sequence can be gone on with behind a token only if the window before that token is there. So
what is stored of it are its tokens' rows of the first pool, and windows before single points (:mod:`prism.kv.points`):
where it ended. What comes back gets slots of windows for the last tokens only; the tree is told that the others have
left theirs, as SGLang tells it of a request that has decoded far beyond its prompt.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache_components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from prism.memory.rows import RowNumbers, pool_rows
from sglang_patches.kv_lease import evict
from sglang_patches.seat import KvStore

WINDOWS = (ComponentType.FULL, ComponentType.SWA)


def why_stays(tree: Any) -> str:
    """Why the KV of ``tree`` stays in its engine; "" when it can move: a tree of one of the two kinds over pools of
    Prism's, a token to a slot. What moves is named by its tokens alone, and other trees cannot be told of it."""
    name = type(tree).__name__
    if "ChunkCache" in name or getattr(tree, "disable", False):
        return "disable_radix_cache: there is no tree in which a request would find what is brought"
    if type(tree) not in (RadixCache, UnifiedRadixCache):
        return f"a tree of another kind ({name})"
    if type(tree) is UnifiedRadixCache and tuple(tree.tree_components) != WINDOWS:
        return "states of linear attention: they are those of one point of a sequence, which SGLang keeps at a few only"
    if tree.is_eagle:
        return "speculative decoding: its tree names pairs of tokens"
    if tree.page_size != 1:
        return f"page_size {tree.page_size}: a slot is a page of tokens"
    return ""


def has_windows(tree: Any) -> bool:
    return type(tree) is UnifiedRadixCache


def attach(store: KvStore, tree: Any, seat: Any) -> None:
    """``store`` moves rows of the pools behind ``tree`` from now on."""
    allocator = tree.token_to_kv_pool_allocator
    kvcache = allocator.get_kvcache()
    if not has_windows(tree):
        store.attach(pool_rows(kvcache.prism_pool, seat.owner.device))
        return

    def windows_of(slots: RowNumbers) -> RowNumbers:
        table = allocator.full_to_swa_index_mapping
        found: RowNumbers = table[torch.from_numpy(slots).to(table.device)].cpu().numpy()
        return found

    store.attach(pool_rows(kvcache.full_kv_pool.prism_pool, seat.owner.device))
    window_rows = pool_rows(kvcache.swa_kv_pool.prism_pool, seat.owner.device)
    store.attach_points("window", window_rows, int(tree.sliding_window_size), windows_of)


class PlainTree:
    """What is done to a plain tree and its allocator for what comes back."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._tree = scheduler, scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator

    def match(self, tokens: array[int], adapter: str | None) -> tuple[torch.Tensor, Any]:
        """What of ``tokens`` is in the tree: slots, and the node where it ends."""
        match = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(token_ids=tokens, extra_key=adapter)))
        return match.device_indices, match.last_device_node

    def lock(self, node: Any) -> Any:
        """The way to ``node`` stays. What :meth:`unlock` wants to be given."""
        return self._tree.inc_lock_ref(node)

    def unlock(self, node: Any, lock: Any) -> None:
        self._tree.dec_lock_ref(node)

    def take(self, count: int, point_tokens: int) -> torch.Tensor | None:
        """Slots for ``count`` tokens, the last ``point_tokens`` of which need one of every kind; None: there are not
        so many."""
        missing = count - self._allocator.available_size()
        if missing > 0:
            evict(self._scheduler, missing)
        slots: torch.Tensor | None = self._allocator.alloc(count)
        return slots

    def insert(
        self, tokens: array[int], adapter: str | None, prefix: torch.Tensor, slots: torch.Tensor, point_tokens: int
    ) -> None:
        """``tokens`` are in ``prefix``, which the tree has, and in ``slots``, which are the tree's from now on. Slots
        of tokens that another request has computed meanwhile are free again."""
        key = RadixKey(token_ids=tokens, extra_key=adapter)
        known = self._tree.insert(InsertParams(key=key, value=torch.cat([prefix, slots]))).prefix_len - len(prefix)
        if known > 0:
            self._allocator.free(slots[:known])


class WindowTree(PlainTree):
    """The same for one with windows."""

    def unlock(self, node: Any, lock: Any) -> None:
        self._tree.dec_lock_ref(node, lock.to_dec_params())

    def take(self, count: int, point_tokens: int) -> torch.Tensor | None:
        full, window = self._allocator.full_attn_allocator, self._allocator.swa_attn_allocator
        for part, needed in zip(self._allocator.lease.parts, (count, point_tokens), strict=True):
            if (missing := needed - part.available()) > 0:
                evict(self._scheduler, missing, part)
        if full.available_size() < count or window.available_size() < point_tokens:
            return None
        slots: torch.Tensor = full.alloc(count)
        self._allocator.full_to_swa_index_mapping[slots] = 0
        self._allocator.set_full_to_swa_mapping(slots[count - point_tokens :], window.alloc(point_tokens))
        return slots

    def insert(
        self, tokens: array[int], adapter: str | None, prefix: torch.Tensor, slots: torch.Tensor, point_tokens: int
    ) -> None:
        value, left = torch.cat([prefix, slots]), len(tokens) - point_tokens
        key = RadixKey(token_ids=tokens, extra_key=adapter)
        self._tree.insert(InsertParams(key=key, value=value, prev_prefix_len=len(prefix), swa_evicted_seqlen=left))


def moved_tree(scheduler: Any) -> PlainTree:
    """Of the scheduler's tree, which :func:`why_stays` has nothing against."""
    return WindowTree(scheduler) if has_windows(scheduler.tree_cache) else PlainTree(scheduler)
