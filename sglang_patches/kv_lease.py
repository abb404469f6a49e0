"""How much of the device's memory this engine's KV cache holds, decided between scheduling steps.

Before each step the lease grows to what the step and the next admissions need, as far as the device's account grants
it, and shrinks when the account asks for memory back: unused lease first, then cached prefixes; above its limit the
engine also retracts running requests (SGLang does so once :meth:`KvLease.available_tokens` says there is no room).
Tensor-parallel ranks agree on every change, since all of them must schedule alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prism import memory
from sglang_patches.kv_placement import own_blocks
from sglang_patches.seat import Seat

_CLIP_NEW_TOKENS = 4096
"""SGLang's admission looks at most so many tokens of one request ahead (``CLIP_MAX_NEW_TOKENS``)."""
_STARVED_WAIT_S = 0.05
"""How long an engine that can run nothing waits at a time for its neighbours to give up what they only cache."""
_LOOKAHEAD_STEPS = 16
"""Decode steps the lease covers ahead, so that it does not change at every step."""


class KvLease:
    """The lease of one pool. ``size`` is the pool's virtual size in tokens."""

    def __init__(self, pool: memory.Pool, seat: Seat, size: int) -> None:
        self.pool, self._seat, self._size = pool, seat, size
        self._own = own_blocks(pool)
        self._spread = 0
        """Slots this rank could still hand out beyond what the tightest rank can."""
        self._last_available = 0
        self._resting = False
        self.retractions = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on this rank."""
        return int(self.pool.slot_bytes)

    def available_tokens(self) -> int:
        """Slots that can be handed out for certain, on every rank alike."""
        return max(0, self._mine() - self._spread)

    def before_step(self, scheduler: Any) -> None:
        """Adjust the lease for the step about to be scheduled."""
        self._resting = False
        decode, admission = demand_tokens(scheduler, self.pool.block_slots if self._own else 1)
        wanted, excess = self._asked_back(scheduler)
        if wanted > 0:
            self._give_back(scheduler, wanted, excess, keep=0 if excess else decode + self._scattered())
            self.pool.ensure(self._within_size(decode // _LOOKAHEAD_STEPS))
        else:
            cached = int(scheduler.tree_cache.evictable_size())
            self._grow(decode, admission, cached)
            if admission > 0 and decode == 0:
                self._ask_neighbours(scheduler.waiting_queue, cached)
        self._agree(scheduler)
        available = self.available_tokens()
        if available > self._last_available:
            # SGLang closes admission until something finishes; new memory is a reason to look again.
            scheduler.running_batch.batch_is_full = False
        self._last_available = available

    def rest(self, scheduler: Any) -> None:
        """The engine is idle: keep only cached prefixes, and fewer of them when others wait for memory."""
        wanted, excess = self._asked_back(scheduler)
        if wanted > 0:
            self._give_back(scheduler, wanted, excess, keep=0)
        if not self._resting:
            self._resting = True
            self.pool.give_back()
            self.pool.trim()

    def _scattered(self) -> int:
        """Free slots in blocks that sequences keep for themselves: new ones need others."""
        return int(self.pool.scattered()) if self._own else 0

    def _mine(self) -> int:
        return min(int(self.pool.available()), self._size - int(self.pool.used()))

    def _within_size(self, tokens: int) -> int:
        return min(tokens, self._size - int(self.pool.used()))

    def _asked_back(self, scheduler: Any) -> tuple[int, int]:
        """Bytes the account wants back, and the part of it that is above the engine's own limit."""
        wanted, excess = int(self.pool.pressure()), self._seat.owner.excess()
        if self._seat.world == 1:
            return wanted, excess
        both = torch.tensor([wanted, excess], dtype=torch.int64)
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=scheduler.tp_cpu_group)
        return int(both[0]), int(both[1])

    def _agree(self, scheduler: Any) -> None:
        if self._seat.world == 1:
            return
        mine = self._mine()
        least = torch.tensor([mine], dtype=torch.int64)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group)
        self._spread = mine - int(least[0])

    def _give_back(self, scheduler: Any, wanted: int, excess: int, keep: int) -> None:
        """First what nothing needs, then cached prefixes; what is above the limit then becomes a target that SGLang
        reaches by retracting."""
        missing = wanted - int(self.pool.give_back(keep, wanted))
        while missing > 0 and evict(scheduler, -(-missing // self.token_bytes)):
            missing -= int(self.pool.give_back(keep, missing))
        excess = min(excess, missing)
        if excess > 0:
            self.pool.set_lease(max(0, int(self.pool.lease_bytes) - excess))

    def _grow(self, decode: int, admission: int, cached: int) -> None:
        scattered = self._scattered()
        for tokens in (decode + admission, decode + admission - cached, decode, decode - cached):
            if self.pool.ensure(self._within_size(max(tokens, 0) + scattered)):
                return
        if scattered:  # then sequences share blocks
            self.pool.ensure(self._within_size(decode))

    def _ask_neighbours(self, waiting: Sequence[Any], cached: int) -> None:
        """Nothing runs here. If the first request has no room either, wait for it as others feel the pressure: what an
        idle engine has cached would be kept from this one for ever."""
        if not waiting:
            return
        tokens = self._within_size(_rounded(_length(waiting[0]), self.pool.block_slots if self._own else 1) - cached)
        missing, page = (tokens - self._mine()) * self.token_bytes, int(self._seat.owner.page_bytes)
        if missing <= 0:
            return
        nbytes = -(-missing // page) * page
        try:
            self._seat.owner.reserve(nbytes, "kv", timeout_s=_STARVED_WAIT_S)
        except memory.errors.DeviceMemoryError:
            return  # this step; the next one asks again
        self._seat.owner.release(nbytes, "kv")
        self.pool.ensure(tokens)


def demand_tokens(scheduler: Any, block: int) -> tuple[int, int]:
    """Slots needed soon, in whole blocks of ``block``: by the requests that decode, and by each of those that wait (as
    SGLang's admission counts them)."""
    ratio = scheduler.new_token_ratio_tracker.current
    running = [r for r in scheduler.running_batch.reqs if not r.finished()]
    if scheduler.last_batch is not None and scheduler.last_batch is not scheduler.running_batch:
        running += [r for r in scheduler.last_batch.reqs if not r.finished()]
    decode = _rounded(len(running) * _LOOKAHEAD_STEPS, block)
    reserved = sum(int(_remaining(r) * ratio) for r in running)
    waiting = list(scheduler.waiting_queue[: scheduler.max_running_requests])
    if scheduler.chunked_req is not None:
        waiting.append(scheduler.chunked_req)
    if not waiting:
        return decode, 0
    admission = sum(_rounded(_length(r), block) for r in waiting)
    return decode, max(0, reserved - decode) + admission


def _rounded(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def _length(req: Any) -> int:
    """Tokens of a request that waits, at its end."""
    return len(req.origin_input_ids) + len(req.output_ids) + _remaining(req) + 1


def _remaining(req: Any) -> int:
    left = int(req.sampling_params.max_new_tokens) - len(req.output_ids)
    return min(max(left, 0), _CLIP_NEW_TOKENS)


def evict(scheduler: Any, tokens: int) -> bool:
    """Drop up to ``tokens`` cached tokens that no request uses. False: there were none."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    tokens = min(tokens, int(scheduler.tree_cache.evictable_size()))
    if tokens > 0:
        scheduler.tree_cache.evict(EvictParams(num_tokens=tokens))
    return tokens > 0
