"""Sliding-window hybrids (gpt-oss, Llama-4, MiMo, Gemma-4, Mellum, Laguna): layers that see everything, and layers
that see a window, whose slots go when they leave it.

SGLang has two pools and two allocators for them, and a table from the slot of one to that of the other. Each pool is
a group of its own here; a lease over both decides (:mod:`sglang_patches.kv_lease`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from prism import memory
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_guard import refuse
from sglang_patches.kv_lease import KvLease
from sglang_patches.kv_placement import SlotPlacement, Slots


def make_pools(original: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``SWAKVPool.__init__``, which makes the pool of the windows and then the other."""
    if not kwargs["full_attention_layer_ids"]:
        raise refuse("attention that sees windows only", "the model with disable_hybrid_swa_memory: true")
    original(pool, *args, **kwargs)
    mark_windows(pool)


def mark_windows(pool: Any) -> None:
    """The group of the pool of windows is one of windows."""
    inner = pool.swa_kv_pool
    groups = inner.prism_seat.kv_groups
    index = groups.index(inner.prism_group)
    groups[index] = inner.prism_group = replace(inner.prism_group, kind=memory.GroupKind.WINDOW)


def finish_allocator(original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``SWATokenToKVPoolAllocator.__init__``: one lease over both groups, and a table as long as slot
    numbers."""
    known = getattr(allocator, "full_to_swa_index_mapping", None)
    original(allocator, *args, **kwargs)
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    allocator.lease = KvLease([full.part, window.part], allocator._kvcache.full_kv_pool.prism_seat)
    allocator.placement = GroupPlacements(full.placement, window.placement)
    rows = full.group.pool.rows + allocator.page_size
    if known is None or len(known) != rows + 1:
        known = torch.empty(rows + 1, dtype=torch.int64, device=allocator.device)
    allocator.full_to_swa_index_mapping = clear_table(known)
    allocator._kvcache.register_mapping(known)


def clear_table(table: torch.Tensor) -> torch.Tensor:
    """No slot has one of a window; -1, which is no slot, stays -1."""
    table.zero_()
    table[-1] = -1
    return table


def lay_out_again(allocator: Any) -> None:
    """Pools and allocators of a model that comes back, where captured graphs expect them: in the order in which SGLang
    makes them, with the table where it was."""
    pool = allocator.get_kvcache()
    pool.swa_kv_pool._create_buffers()
    pool.full_kv_pool._create_buffers()
    mark_windows(pool)
    allocator.__init__(
        allocator.size_full,
        allocator.size_swa,
        allocator.page_size,
        allocator.dtype,
        allocator.device,
        pool,
        allocator.need_sort,
    )


class GroupPlacements:
    """Whose the next slots are, for both groups alike."""

    def __init__(self, *parts: SlotPlacement) -> None:
        self._parts = parts

    @contextmanager
    def prompts(self, lengths: Sequence[int]) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.prompts(lengths))
            yield

    @contextmanager
    def steps(self, rows: Slots) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.steps(rows))
            yield

    def remember(self, rows: Slots, table_rows: int) -> None:
        for part in self._parts:
            part.remember(rows, table_rows)


def pool_sizes(configurator: Any, available_bytes: int, page_size: int) -> Any:
    """Replaces ``HybridSWAPoolConfigurator.calculate_pool_sizes``: SGLang divides memory between the groups once and
    for all; here each may have what the account grants. Tokens that every layer keeps could take all memory but for one
    request's window and chunk; windows, all memory."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

    full_bytes = configurator._full_per_token * configurator._full_layers_num
    window_bytes = configurator._swa_per_token * configurator._swa_layers_num
    least = configurator._sliding_window_size + 2 * page_size
    if full_bytes == 0:
        raise refuse("attention that sees windows only", "the model with disable_hybrid_swa_memory: true")
    if available_bytes < least * (full_bytes + window_bytes):
        needed_bytes = least * (full_bytes + window_bytes)
        raise memory.errors.OutOfMemory(
            "the memory for KV does not hold one window of every layer",
            {"available_bytes": available_bytes, "needed_bytes": needed_bytes},
        )
    kept_bytes = min((least + configurator.prism_chunk) * window_bytes, max(least * window_bytes, available_bytes // 2))
    full = int((available_bytes - kept_bytes) // full_bytes) // page_size * page_size
    window = int(available_bytes // window_bytes) // page_size * page_size
    return MemoryPoolConfig(
        max_total_num_tokens=full, full_max_total_num_tokens=full, swa_max_total_num_tokens=min(full, window)
    )


def note_chunk(result: None, configurator: Any, kvc: Any) -> None:
    """After ``HybridSWAPoolConfigurator.__init__``."""
    chunk = kvc.server_args.chunked_prefill_size
    configurator.prism_chunk = chunk if chunk is not None and chunk > 0 else kvc.server_args.max_prefill_tokens


def window_info(observer: Any) -> Any:
    """Replaces ``SchedulerPoolStatsObserver._get_swa_token_info``: an unleased slot is free, not leaked."""
    from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats

    allocator, tree = observer.token_to_kv_pool_allocator, observer.tree_cache
    full, window = allocator.full_attn_allocator.unleased_size(), allocator.swa_attn_allocator.unleased_size()
    full_cached, window_cached = tree.full_evictable_size(), tree.swa_evictable_size()
    full_used = observer.full_tokens_per_layer - full - full_cached
    window_used = observer.swa_tokens_per_layer - window - window_cached
    return PoolStats(
        is_hybrid_swa=True,
        full_num_used=full_used,
        full_token_usage=full_used / observer.full_tokens_per_layer,
        full_available_size=full,
        full_evictable_size=full_cached,
        swa_num_used=window_used,
        swa_token_usage=window_used / observer.swa_tokens_per_layer,
        swa_available_size=window,
        swa_evictable_size=window_cached,
    )


_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator"
HOOKS = (
    Hook(
        "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.__init__",
        HookKind.AROUND,
        make_pools,
        (
            "self",
            "size",
            "size_swa",
            "page_size",
            "dtype",
            "head_num",
            "head_dim",
            "swa_attention_layer_ids",
            "full_attention_layer_ids",
            "device",
            "token_to_kv_pool_class",
            "kwargs",
        ),
        "which group is that of the windows",
    ),
    Hook(
        "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.__init__",
        HookKind.AROUND,
        finish_allocator,
        ("self", "size", "size_swa", "page_size", "dtype", "device", "kvcache", "need_sort"),
        "one lease over both groups",
    ),
    Hook(
        f"{_CONFIGURATOR}.__init__",
        HookKind.AFTER,
        note_chunk,
        ("self", "kvc"),
        "the chunk of a prompt, which its division of memory needs",
    ),
    Hook(
        f"{_CONFIGURATOR}.calculate_pool_sizes",
        HookKind.REPLACE,
        pool_sizes,
        ("self", "available_bytes", "page_size"),
        "sizes are address space, not memory",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver._get_swa_token_info",
        HookKind.REPLACE,
        window_info,
        ("self",),
        "the leak check counts virtual slots",
    ),
)
