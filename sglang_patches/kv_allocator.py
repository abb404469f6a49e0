"""SGLang's slot allocators on top of Prism's: handing out a slot maps its page, freeing a page's last unmaps it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from prism import memory
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_group_lease import GroupLease
from sglang_patches.kv_lease import KvLease
from sglang_patches.kv_placement import SlotPlacement, own_blocks
from sglang_patches.kv_returns import SlotReturns, to_device


class ElasticAllocator(BaseTokenToKVPoolAllocator):  # type: ignore[misc]
    """Slots of one elastic group, numbered by tokens.

    :meth:`available_size` is a promise: that many slots are covered by an exclusive lease, so ``alloc`` of up to that
    many cannot fail, whatever other processes do. The lease changes only between scheduling steps (:class:`KvLease`).
    """

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        pool = getattr(kvcache, "full_kv_pool", kvcache)  # beside states of linear attention: the attention layers'
        self.group: memory.KvGroup = pool.prism_group
        self._pool = self.group.pool
        self.returns = SlotReturns(self._slots())
        self.part = GroupLease(self.group, self.returns)
        """What may be handed out here."""
        self.lease = KvLease([self.part], pool.prism_seat)
        """The engine's lease: over this group and, where it is not the only one, the others."""
        # SGLang's page census reads these lists; there is no list of free slots here, so they stay empty.
        self.free_pages = self.release_pages = torch.empty((0,), dtype=torch.int64)

    def clear(self) -> None:
        """SGLang's flush of an idle engine: every slot is free again."""
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        self.returns.forget()
        self._pool.reset()

    def available_size(self) -> int:
        return self.part.available()

    def unleased_size(self) -> int:
        """Slots not in use, leased or not: what SGLang's leak check must see as free."""
        return int(self.size - self.part.used() + self.returns.coming)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self.is_not_in_free_group:
            self.returns.free(free_index)
        else:
            self.free_group.append(free_index)

    def _slots(self) -> Any:
        """What takes freed tokens back."""
        return self._pool

    def backup_state(self) -> Any:
        raise NotImplementedError("elastic KV memory cannot be rolled back (speculative decoding is not supported)")

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None) -> Any:
        return self._kvcache.get_cpu_copy(indices, mamba_indices=mamba_indices)

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None) -> Any:
        return self._kvcache.load_cpu_copy(kv_cache_cpu, indices, mamba_indices=mamba_indices)


class ElasticTokenAllocator(ElasticAllocator):
    """A slot per token."""

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort)
        self.placement = SlotPlacement(self._pool)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size > self.available_size():
            return None
        return to_device(torch.from_numpy(self.placement.take(need_size)), self.device)


class ElasticPagedAllocator(ElasticAllocator):
    """A slot per page of ``page_size`` tokens; a sequence's tokens fill its pages in order."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)
        self.placement = Unplaced()
        self._own = own_blocks(self._pool)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` tokens in whole pages."""
        if need_size > self.available_size():
            return None
        pages = self._pool.alloc(need_size // self.page_size)
        return self._on_device((pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1))

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """The slots of the tokens from ``prefix_lens`` to ``seq_lens`` of each sequence, one behind the other; a
        sequence goes on in the page of its ``last_loc``. None: not enough pages."""
        return self._extend(prefix_lens_cpu.numpy(), seq_lens_cpu.numpy(), last_loc.cpu().numpy())

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """The same for one token more of each sequence, of ``seq_lens`` with it."""
        lengths = seq_lens_cpu.numpy()
        return self._extend(lengths - 1, lengths, last_loc.cpu().numpy())

    def _extend(self, before: np.ndarray, after: np.ndarray, last: np.ndarray) -> torch.Tensor | None:
        page = self.page_size
        new_pages = -(-after // page) - -(-before // page)
        if int(new_pages.sum()) * page > self.available_size():
            return None
        pages = self._take(new_pages, last // page)
        found, done = [], 0
        for start, end, count, end_slot in zip(before, after, new_pages, last, strict=True):
            rest = min(int(-start % page), int(end - start))  # in the page that is begun already
            mine = pages[done : done + count, None] * page + np.arange(page)
            found += [end_slot + 1 + np.arange(rest), mine.reshape(-1)[: int(end - start) - rest]]
            done += int(count)
        return self._on_device(np.concatenate(found)) if found else self._on_device(np.zeros(0, dtype=np.int64))

    def _take(self, counts: np.ndarray, last_pages: np.ndarray) -> np.ndarray:
        """Pages for the sequences, one behind the other: near their last ones where sequences have blocks of their
        own."""
        if self._own and counts.max(initial=0) <= 1:
            after = last_pages[counts > 0]
            return self._pool.alloc_after(np.ascontiguousarray(after, dtype=np.int64)) if len(after) else after
        pages: np.ndarray = self._pool.alloc(int(counts.sum()), fresh=self._own)
        return pages

    def _on_device(self, slots: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(slots.astype(np.int64, copy=False)), self.device)

    def _slots(self) -> Any:
        return PagesOf(self._pool, self.page_size)


class PagesOf:
    """A pool whose slots are freed by their tokens: all of a page at once."""

    def __init__(self, pool: memory.Pool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size

    def free(self, tokens: torch.Tensor) -> None:
        self._pool.free(torch.unique(tokens // self._page_size))


class Unplaced:
    """In place of :class:`SlotPlacement`: pages are told to the allocator sequence by sequence."""

    def prompts(self, lengths: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def steps(self, rows: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def remember(self, rows: Any, table_rows: int) -> None:
        pass


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


_ALLOCATORS = "sglang.srt.mem_cache.allocator"
HOOKS = (
    Hook(
        f"{_ALLOCATORS}.token.TokenToKVPoolAllocator",
        HookKind.REPLACE,
        ElasticTokenAllocator,
        ("self", "size", "dtype", "device", "kvcache", "need_sort"),
        "slots map and unmap pages",
    ),
    Hook(
        f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator",
        HookKind.REPLACE,
        ElasticPagedAllocator,
        ("self", "size", "page_size", "dtype", "device", "kvcache", "need_sort"),
        "slots of several tokens map and unmap pages",
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
assert issubclass(PagedTokenToKVPoolAllocator, BaseTokenToKVPoolAllocator)
