"""SGLang's slot allocator on top of Prism's: handing out a slot maps its page, freeing a page's last unmaps it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_lease import KvLease
from sglang_patches.kv_placement import SlotPlacement
from sglang_patches.kv_returns import SlotReturns, to_device


class ElasticTokenAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """Slots of one elastic pool.

    :meth:`available_size` is a promise: that many slots are covered by an exclusive lease, so ``alloc`` of up to that
    many cannot fail, whatever other processes do. The lease changes only between scheduling steps (:class:`KvLease`).
    """

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)
        self._pool = kvcache.prism_pool
        self.returns = SlotReturns(self._pool)
        self.lease = KvLease(self._pool, kvcache.prism_seat, size, self.returns)
        self.placement = SlotPlacement(self._pool)
        # SGLang's page census reads these lists; there is no list of free slots here, so they stay empty.
        self.free_pages = self.release_pages = torch.empty((0,), dtype=torch.int64)

    def clear(self) -> None:
        """SGLang's flush of an idle engine: every slot is free again."""
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        self.returns.forget()
        self._pool.reset()

    def available_size(self) -> int:
        return self.lease.available_tokens()

    def unleased_size(self) -> int:
        """Slots not in use, leased or not: what SGLang's leak check must see as free."""
        return int(self.size - self._pool.used()) + self.returns.coming

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.available_size():
            return None
        return to_device(torch.from_numpy(self.placement.take(need_size)), self.device)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.is_not_in_free_group:
            self.returns.free(free_index)
        else:
            self.free_group.append(free_index)

    def backup_state(self) -> Any:
        raise NotImplementedError("elastic KV memory cannot be rolled back (speculative decoding is not supported)")

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None) -> Any:
        return self._kvcache.get_cpu_copy(indices, mamba_indices=mamba_indices)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None) -> Any:
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices, mamba_indices=mamba_indices)


def token_info(observer: Any) -> Any:
    """Replaces ``SchedulerPoolStatsObserver._get_token_info``: an unleased slot is free, not leaked."""
    from sglang.srt.managers.scheduler_components.pool_stats_observer import PoolStats

    free = observer.token_to_kv_pool_allocator.unleased_size()
    evictable = observer.tree_cache.evictable_size()
    used = observer.max_total_num_tokens - free - evictable
    return PoolStats(
        full_num_used=used,
        full_token_usage=used / observer.max_total_num_tokens,
        full_available_size=free,
        full_evictable_size=evictable,
    )


_ALLOCATOR = "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator"
HOOKS = (
    Hook(
        _ALLOCATOR,
        HookKind.REPLACE,
        ElasticTokenAllocator,
        ("self", "size", "dtype", "device", "kvcache", "need_sort"),
        "slots map and unmap pages",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver._get_token_info",
        HookKind.REPLACE,
        token_info,
        ("self",),
        "the leak check counts virtual slots",
    ),
)
assert issubclass(TokenToKVPoolAllocator, BaseTokenToKVPoolAllocator)
