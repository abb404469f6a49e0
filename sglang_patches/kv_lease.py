"""How much of the device's memory this engine's KV cache holds, decided between scheduling steps.

Before each step the lease grows to what the step and the next admissions need, as far as the device's account grants
it, and shrinks when the account asks for memory back: unused lease first, then cached prefixes; above its limit the
engine also retracts running requests (SGLang does so once :meth:`KvLease.available_tokens` says there is no room).
What the account does not grant stands there as a wish, which neighbours feel as they step or rest.
Tensor-parallel ranks agree on every change, since all of them must schedule alike.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import ceil
from typing import Any

import torch

from prism import memory
from sglang_patches.kv_placement import own_blocks
from sglang_patches.kv_returns import SlotReturns
from sglang_patches.seat import Seat

_CLIP_NEW_TOKENS = 4096
"""SGLang's admission looks at most so many tokens of one request ahead (``CLIP_MAX_NEW_TOKENS``)."""
_LOOKAHEAD_STEPS = 16
"""Decode steps the lease covers ahead, so that it does not change at every step."""


class KvLease:
    """The lease of one pool. ``size`` is the pool's virtual size in tokens, ``returns`` its slots that come back."""

    def __init__(self, pool: memory.Pool, seat: Seat, size: int, returns: SlotReturns | None = None) -> None:
        self.pool, self._seat, self._size = pool, seat, size
        self._returns = SlotReturns(pool) if returns is None else returns
        self._own = own_blocks(pool)
        self._spread = 0
        """Slots this rank could still hand out beyond what the tightest rank can."""
        self._last_available = 0
        self._resting = False
        self._head: str | None = None
        """The first request that waits, and since when (monotonic ns, the same on all ranks)."""
        self._since_ns = 0
        self._ahead_bytes = 0
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
        self._resting = self._returns.defer = False
        self._returns.settle()
        running, admissions = demand_tokens(scheduler, self.pool.block_slots if self._own else 1)
        wanted, excess = self._agree_on_pressure(scheduler)
        if wanted > 0 or self._mine() < running + self._scattered() + (admissions[-1] if admissions else 0):
            self._returns.settle(wait=True)
        if wanted > 0:
            self._give_back(scheduler, wanted, excess, keep=0 if excess else running + self._scattered())
            self.pool.ensure(self._within_size(running // _LOOKAHEAD_STEPS))
        else:
            self._grow(running, admissions, int(scheduler.tree_cache.evictable_size()))
        self._back(scheduler, running + (admissions[-1] if admissions else 0))
        self._wish(scheduler, running, admissions)
        self._map_ahead(running)
        self._agree_on_available(scheduler)
        available = self.available_tokens()
        if available > self._last_available:
            # SGLang closes admission until something finishes; new memory is a reason to look again.
            scheduler.running_batch.batch_is_full = False
        self._last_available = available

    def planned(self, ahead: bool) -> None:
        """The step is scheduled. ``ahead``: the device still computes it when the results of the one before are
        processed, so that reading there what they free would wait for it."""
        self._returns.defer = ahead

    def rest(self, scheduler: Any) -> None:
        """The engine is idle: keep only cached prefixes, and fewer of them when others wait for memory."""
        self._returns.settle(wait=True)
        self.withdraw_wish()
        wanted, excess = self._agree_on_pressure(scheduler)
        if wanted > 0:
            self._give_back(scheduler, wanted, excess, keep=0)
        if not self._resting:
            self._resting = True
            self._map_ahead(0)
            self.pool.trim()

    def _scattered(self) -> int:
        """Free slots in blocks that sequences keep for themselves: new ones need others."""
        return int(self.pool.scattered()) if self._own else 0

    def _mine(self) -> int:
        return min(int(self.pool.available()), self._size - int(self.pool.used()))

    def _within_size(self, tokens: int) -> int:
        return min(tokens, self._size - int(self.pool.used()))

    def _agree_on_pressure(self, scheduler: Any) -> tuple[int, int]:
        """Bytes the account wants back, and the part of it that is above the engine's own limit."""
        wanted, excess, now_ns = int(self.pool.pressure()), self._seat.owner.excess(), time.monotonic_ns()
        if self._seat.world > 1:
            agreed = torch.tensor([wanted, excess, now_ns], dtype=torch.int64)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX, group=scheduler.tp_cpu_group)
            wanted, excess, now_ns = agreed.tolist()
        self._note_head(scheduler, now_ns)
        return wanted, excess

    def _note_head(self, scheduler: Any, now_ns: int) -> None:
        """The age of this engine's wish counts from when its last request was let in, so that each gets its turn."""
        head = scheduler.waiting_queue[0].rid if scheduler.waiting_queue else None
        if head != self._head:
            self._head, self._since_ns = head, now_ns

    def _agree_on_available(self, scheduler: Any) -> None:
        if self._seat.world == 1:
            return
        mine = self._mine()
        least = torch.tensor([mine], dtype=torch.int64)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group)
        self._spread = mine - int(least[0])

    def _give_back(self, scheduler: Any, wanted: int, excess: int, keep: int) -> None:
        """First what nothing needs, then cached prefixes; what is above the limit then becomes a target that SGLang
        reaches by retracting."""
        given = int(self.pool.give_back(keep, max(0, wanted - self._leaving_bytes())))
        while (missing := wanted - given - self._leaving_bytes()) > 0:
            if not evict(scheduler, -(-missing // self.token_bytes)):
                break
            given += int(self.pool.give_back(keep, missing))
        excess = min(excess, missing)
        if excess > 0:
            self.pool.set_lease(max(0, int(self.pool.lease_bytes) - excess))

    def _leaving_bytes(self) -> int:
        """What goes back as soon as the steps in flight, which may read it, are over: nothing more is due for it."""
        now = self.pool.stats()
        return min(int(now["lease_bytes"] - now["target_bytes"]), int(now["deferred_bytes"]))

    def _grow(self, running: int, admissions: Sequence[int], cached: int) -> None:
        """What runs takes what is free; new requests, as many as fit, what no wish that goes first needs."""
        base = running + self._scattered()
        if admissions:
            if self._try_ensure(base + admissions[-1]):
                return
            fitting = bisect_left(admissions, True, key=lambda tokens: not self._try_ensure(base + tokens - cached))
            if fitting:  # its own cache then makes room for the rest
                return
        for tokens in (base, base - cached, running):  # the last: sequences share blocks
            if self.pool.ensure(self._within_size(max(tokens, 0))):
                return

    def _back(self, scheduler: Any, tokens: int) -> None:
        """Have pages behind all that the step may take of ``tokens``. A device that is full in spite of its account
        (others use it too) then says so here: the lease shrinks and SGLang retracts; within the step it would crash."""
        block = self.pool.block_slots if self._own else 1
        chunk = int(scheduler.chunked_prefill_size or scheduler.max_prefill_tokens)
        self.pool.back(min(tokens, chunk + int(scheduler.max_running_requests) * block), self._own)

    def _try_ensure(self, tokens: int) -> bool:
        return self.pool.ensure(self._within_size(max(tokens, 0)), yielding=True)

    def _wish(self, scheduler: Any, running: int, admissions: Sequence[int]) -> None:
        """Have the account know what is missing beyond this engine's own cache. It stands until the next step says
        otherwise, so that it is there when a neighbour looks, which may be long after."""
        base = running + self._scattered() - int(scheduler.tree_cache.evictable_size())
        mine = self._mine()
        missing = [self._within_size(base + tokens) - mine for tokens in (0, *admissions)]
        missing = [tokens for tokens in missing if tokens > 0]
        if missing:
            self._seat.owner.wish(self._bytes(missing[0]), self._bytes(missing[-1]), self._since_ns)
        else:
            self.withdraw_wish()

    def _map_ahead(self, tokens: int) -> None:
        """Have so much of the lease mapped while the device computes, so that the next steps find their pages there.
        It is held already, and goes like any other part of the lease that nothing uses: before cached prefixes."""
        wanted = self._bytes(tokens)
        if wanted != self._ahead_bytes:
            self.pool.set_ahead(wanted, None)
            self._ahead_bytes = wanted

    def withdraw_wish(self) -> None:
        """Nothing is missing here, or the model leaves."""
        if self._seat.owner.wished_bytes:
            self._seat.owner.wish(0, 0)

    def _bytes(self, tokens: int) -> int:
        """Whole blocks with so many slots."""
        return -(-tokens // int(self.pool.block_slots)) * int(self.pool.block_bytes)


def demand_tokens(scheduler: Any, block: int) -> tuple[int, list[int]]:
    """Slots needed soon, in whole blocks of ``block``: by what runs (steps of decoding, the rest of a prompt that is
    taken in by chunks), and beyond that by the first, the first two, ... of the requests that wait, as SGLang's
    admission counts them: with what running requests may still need.

    With overlap the last step's tokens are not known yet. Its requests count as if they went on, as they do: SGLang
    runs one step more of each before it sees that it has ended."""
    ratio = scheduler.new_token_ratio_tracker.current
    requests = [r for r in scheduler.running_batch.reqs if not r.finished()]
    if scheduler.last_batch is not None and scheduler.last_batch is not scheduler.running_batch:
        requests += [r for r in scheduler.last_batch.reqs if not r.finished()]
    running = _rounded(len(requests) * _LOOKAHEAD_STEPS, block)
    reserved = sum(ceil(_remaining(r) * ratio) for r in requests)
    if (chunked := scheduler.chunked_req) is not None:
        prompt = len(chunked.origin_input_ids) + len(chunked.output_ids) - len(chunked.prefix_indices)
        running += _rounded(max(prompt, 0), block)
        reserved += _remaining(chunked)
    waiting = scheduler.waiting_queue[: max(0, scheduler.max_running_requests - len(requests))]
    extra = max(0, reserved - running)
    return running, [extra + total for total in accumulate(_rounded(_length(r), block) for r in waiting)]


def _rounded(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def _length(req: Any) -> int:
    """Tokens for which admission lets a waiting request in: it wants more than its own and one for alignment."""
    return len(req.origin_input_ids) + len(req.output_ids) + _remaining(req) + 2


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
