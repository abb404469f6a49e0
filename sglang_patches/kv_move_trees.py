"""SGLang's three kinds of trees whose KV moves, as far as what moves differs.

========================  ==========================================================================
plain (``RadixCache``)    a token has one slot
windows                   a token has a slot in the layers that see everything, and while it is in a
(``UnifiedRadixCache``)   window one of another pool; the allocator's table leads from one to the other
states                    a token has one slot, and where a node ends there may be a state, of all tokens
(``UnifiedRadixCache``)   up to there, in a slot of the pool of states
========================  ==========================================================================

In a tree with windows a sequence can be gone on with behind a token only if the window before that token is there. So
what is stored of it are its tokens' rows of the first pool, and windows before single points (:mod:`prism.kv.points`):
where it ended. What comes back gets slots of windows for the last tokens only; the tree is told that the others have
left theirs, as SGLang tells it of a request that has decoded far beyond its prompt.

States are the same with one row to a point: a sequence goes on only behind a token whose state is there. No table leads
to it; :func:`~sglang_patches.kv_move_states.known_state` says which one it is while it is stored or brought.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache_components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from prism.memory.rows import RowNumbers, pool_rows
from sglang_patches.kv_lease import evict
from sglang_patches.kv_move_states import STATES, has_states, states_behind
from sglang_patches.seat import KvStore

WINDOWS = (ComponentType.FULL, ComponentType.SWA)


def why_stays(tree: Any) -> str:
    """Why the KV of ``tree`` stays in its engine; "" when it can move: a tree of one of the three kinds over pools of
    Prism's, a token to a slot. What moves is named by its tokens alone, and other trees cannot be told of it."""
    name = type(tree).__name__
    if "ChunkCache" in name or getattr(tree, "disable", False):
        return "disable_radix_cache: there is no tree in which a request would find what is brought"
    if type(tree) not in (RadixCache, UnifiedRadixCache):
        return f"a tree of another kind ({name})"
    if type(tree) is UnifiedRadixCache and tuple(tree.tree_components) not in (WINDOWS, STATES):
        return "a cache of other parts than tokens and windows, or tokens and states"
    if has_states(tree) and getattr(tree.req_to_token_pool, "mamba_ckpt_pool", None) is not None:
        return "states that are cached in another form than they are computed in"
    if tree.is_eagle:
        return "speculative decoding: its tree names pairs of tokens"
    if tree.page_size != 1:
        return f"page_size {tree.page_size}: a slot is a page of tokens"
    return ""


def has_points(tree: Any) -> bool:
    """A sequence goes on only at points where more than its tokens' rows is there: a window, a state."""
    return type(tree) is UnifiedRadixCache


def attach(store: KvStore, tree: Any, seat: Any) -> None:
    """``store`` moves rows of the pools behind ``tree`` from now on."""
    allocator = tree.token_to_kv_pool_allocator
    kvcache = allocator.get_kvcache()
    if not has_points(tree):
        store.attach(pool_rows(kvcache.prism_pool, seat.owner.device))
        return
    if has_states(tree):
        states = tree.req_to_token_pool.mamba_allocator.group.pool
        known = states_behind(tree)
        store.attach(pool_rows(allocator.group.pool, seat.owner.device))
        store.attach_points(
            "state",
            pool_rows(states, seat.owner.device),
            1,
            lambda slots: np.array([known.get(int(slot), 0) for slot in slots], dtype=np.int64),
        )
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

    def give_up(self, slots: torch.Tensor, point_tokens: int) -> None:
        """Of what :meth:`take` gave ``slots`` are not filled, the last first."""
        if len(slots):
            self._allocator.free(slots)


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


class StateTree(PlainTree):
    """The same for one with states: who comes back takes one slot of a state, too."""

    def unlock(self, node: Any, lock: Any) -> None:
        self._tree.dec_lock_ref(node, lock.to_dec_params())

    @property
    def _states(self) -> Any:
        return self._tree.req_to_token_pool.mamba_allocator

    def take(self, count: int, point_tokens: int) -> torch.Tensor | None:
        for part, needed in zip(self._allocator.lease.parts, (count, 1), strict=True):
            if (missing := needed - part.available()) > 0:
                evict(self._scheduler, missing, part)
        # A state on its way cannot be evicted, and SGLang takes it for granted that who was let in finds theirs.
        if self._allocator.available_size() < count or self._states.schedulable_available_size() < 1:
            return None
        if not self._states.room_for_one(self._tree):
            return None
        slots: torch.Tensor = self._allocator.alloc(count)
        states_behind(self._tree)[int(slots[-1])] = int(self._states.alloc(1)[0])
        return slots

    def insert(
        self, tokens: array[int], adapter: str | None, prefix: torch.Tensor, slots: torch.Tensor, point_tokens: int
    ) -> None:
        key, value, state = RadixKey(token_ids=tokens, extra_key=adapter), torch.cat([prefix, slots]), self._take(slots)
        params = InsertParams(key=key, value=value, prev_prefix_len=len(prefix), mamba_value=state)
        if self._tree.insert(params).mamba_exist:
            self._states.free(state)

    def give_up(self, slots: torch.Tensor, point_tokens: int) -> None:
        if len(slots):
            self._states.free(self._take(slots))
            self._allocator.free(slots)

    def _take(self, slots: torch.Tensor) -> torch.Tensor:
        """The state that came with ``slots``, which nobody asks for by them any more."""
        return torch.tensor([states_behind(self._tree).pop(int(slots[-1]))], device=slots.device)


def moved_tree(scheduler: Any) -> PlainTree:
    """Of the scheduler's tree, which :func:`why_stays` has nothing against."""
    if has_states(scheduler.tree_cache):
        return StateTree(scheduler)
    return WindowTree(scheduler) if has_points(scheduler.tree_cache) else PlainTree(scheduler)
