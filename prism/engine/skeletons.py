"""What SGLang built for the models a worker had last: objects, addresses and captured graphs, without weights and KV.

A model that comes back to such a worker gets memory behind the same addresses, its weights are copied there, and it
serves. Construction, most of an activation, is skipped. The least recently used is dropped.

::

    active --DeactivateModel--> skeleton --ActivateModel of the same build--> active
                                    \\-- others came since: dropped
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Final

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache, SWAChunkCache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context

from prism.engine.seat import WorkerSeat
from prism.engine.weight_seat import EngineWeights
from sglang_patches.kv_allocator import ElasticTokenAllocator
from sglang_patches.kv_window import lay_out_again

_LAYOUTS: Final = {
    MHATokenToKVPool: (ElasticTokenAllocator, (RadixCache, ChunkCache)),
    MLATokenToKVPool: (ElasticTokenAllocator, (RadixCache, ChunkCache)),
    SWAKVPool: (SWATokenToKVPoolAllocator, (UnifiedRadixCache, SWAChunkCache)),
}
"""By pool: the allocator and the prefix caches over it whose state is known here."""


@dataclass
class Skeleton:
    """One model's, at rest. ``resources`` and ``flags`` are what SGLang has per process and belongs to it."""

    scheduler: Any
    seat: WorkerSeat
    weights: EngineWeights
    resources: Any
    flags: Any


class Skeletons:
    """At most ``most``, by their build's name (:func:`prism.engine.commands.build_name`) and their weights' mark."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[tuple[str, str], Skeleton] = OrderedDict()

    def builds(self) -> list[str]:
        return [build for build, _ in self._kept]

    def take(self, build: str, mark: str) -> Skeleton | None:
        return self._kept.pop((build, mark), None)

    def put(self, build: str, mark: str, skeleton: Skeleton) -> list[Skeleton]:
        """Keep ``skeleton``. Returns those that must be dropped for it."""
        dropped = [found] if (found := self._kept.pop((build, mark), None)) is not None else []
        self._kept[build, mark] = skeleton
        while len(self._kept) > self.most and (oldest := self.pop()) is not None:
            dropped.append(oldest)
        return dropped

    def pop(self) -> Skeleton | None:
        """The one that was used longest ago, not kept any more; None: there is none."""
        return self._kept.popitem(last=False)[1] if self._kept else None


def can_rest(scheduler: Any, weights: EngineWeights) -> bool:
    """Whether all that SGLang keeps for the model is known here, and its weights can come back to their addresses."""
    allocator = scheduler.token_to_kv_pool_allocator
    allocators, caches = _LAYOUTS.get(type(allocator.get_kvcache()), (None, ()))
    return (
        weights.packed is not None
        and weights.whole
        and scheduler.is_generation
        and scheduler.draft_worker is None
        and not scheduler.enable_lora
        and type(allocator) is allocators
        and type(scheduler.req_to_token_pool) is ReqToTokenPool
        and type(scheduler.tree_cache) in caches
    )


def rest(scheduler: Any, seat: WorkerSeat, weights: EngineWeights) -> Skeleton:
    """Forget all requests. The KV pool and the weights' memory are still there, for the caller to give back."""
    scheduler.token_to_kv_pool_allocator.lease.withdraw_wish()
    seat.scheduler = seat.adapters = None
    scheduler.result_queue = deque()
    scheduler.batch_record_buf = [None, None]
    scheduler.init_running_status()
    scheduler.init_chunked_prefill()
    scheduler.grammar_manager.grammar_queue.clear()
    scheduler.tree_cache.reset()
    scheduler.req_to_token_pool.clear()
    scheduler.new_token_ratio_tracker.reset()
    context = get_context()
    return Skeleton(scheduler, seat, weights, context.resources, copy.deepcopy(context.flags))


def wake(skeleton: Skeleton, engine: str) -> None:
    """Make the skeleton the process's model again, as the engine ``engine``. Its weights are in place already."""
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    scheduler, context = skeleton.scheduler, get_context()
    context.set_server_args(scheduler.server_args)
    context.resources, context.flags = skeleton.resources, skeleton.flags
    initialize_dp_attention(server_args=scheduler.server_args, model_config=scheduler.model_config)
    scheduler.init_moe_gemm_config()
    skeleton.seat.begin(engine, scheduler)
    allocator = scheduler.token_to_kv_pool_allocator
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        lay_out_again(allocator)
        return
    kv = allocator.get_kvcache()
    kv._create_buffers()
    allocator.__init__(allocator.size, allocator.dtype, allocator.device, kv, allocator.need_sort)


def all_ranks(agreed: bool, world: int) -> bool:
    """Whether every rank says so: what one cannot do none does. Ranks of one engine ask in the same order."""
    if world == 1:
        return agreed
    from sglang.srt.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return False  # no rank ever had a model
    votes = torch.tensor([int(agreed)], dtype=torch.int64)
    group = parallel_state.get_tp_group().cpu_group
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group)
    return bool(votes[0])
