"""How much of the device's memory this engine's attention state holds, decided between scheduling steps.

Before each step the lease grows to what the step and the next admissions need, as far as the device's account grants
it, and shrinks when the account asks for memory back: unused lease first, then cached prefixes; above its limit the
engine also retracts running requests (SGLang does so once :meth:`KvLease.available_tokens` says there is no room).
What the account does not grant stands there as a wish, which neighbours feel as they step or rest.

A model with several groups (sliding windows, states) has a lease on each, and one wish: what they lack together. A
request is let in only if every group has room for it, so memory for it is taken in all groups or in none.
Tensor-parallel ranks agree on every change, since all of them must schedule alike.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from prism.memory import GroupKind
from sglang_patches.kv_demand import GroupDemand
from sglang_patches.kv_group_lease import GroupLease
from sglang_patches.seat import Seat

_ALL_BYTES = 1 << 62


class KvLease:
    """The leases of an engine's groups; the first is the one that every token takes a slot of."""

    def __init__(self, parts: Sequence[GroupLease], seat: Seat) -> None:
        self.parts, self._seat = tuple(parts), seat
        self._last_available: list[int] = [0] * len(self.parts)
        self._resting = False
        self._head: str | None = None
        """The first request that waits, and since when (monotonic ns, the same on all ranks)."""
        self._since_ns = 0
        self.retractions = 0
        self.lacks_bytes = 0
        """What the first that waits, or what runs, lacks beyond the engine's own cache."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on this rank, while it is in every group."""
        return sum(part.group.token_bytes for part in self.parts)

    def available_tokens(self) -> int:
        """Slots of the first group that can be handed out for certain, on every rank alike."""
        return self.parts[0].available()

    def free_tokens(self, tree: Any) -> int:
        """Tokens that could be taken in now, the prefix cache given up, in every group that grows by tokens."""
        grows = [part for part in self.parts if part.group.kind is not GroupKind.STATES]
        return min(part.available() + part.evictable(tree) for part in grows)

    def used_tokens(self) -> int:
        """Slots in use, for requests or as cache."""
        return self.parts[0].used()

    def mapped_bytes(self) -> int:
        """Physical memory held on this rank."""
        return sum(int(part.pool.stats()["mapped_bytes"]) for part in self.parts)

    def before_step(self, scheduler: Any) -> None:
        """Adjust the lease for the step about to be scheduled."""
        self._resting = False
        for part in self.parts:
            part.returns.defer = False
            part.returns.settle()
        demands = [part.demand(scheduler) for part in self.parts]
        wanted, excess = self._agree_on_pressure(scheduler)
        for part, demand in zip(self.parts, demands, strict=True):
            soon = demand.running + part.scattered() + (demand.admissions[-1] if demand.admissions else 0)
            if wanted > 0 or part.mine() < soon:
                part.returns.settle(wait=True)
        if wanted > 0:
            keeps = [p.kept(d, excess > 0) for p, d in zip(self.parts, demands, strict=True)]
            self._give_back(scheduler, wanted, excess, keeps)
            for part, demand in zip(self.parts, demands, strict=True):
                part.ensure(demand.step)
        else:
            self._grow(scheduler.tree_cache, demands)
        for part, demand in zip(self.parts, demands, strict=True):
            part.back(scheduler, demand)
        self._wish(scheduler.tree_cache, demands)
        self._map_ahead([demand.running for demand in demands])
        self.agree_on_available(scheduler)
        available = [part.available() for part in self.parts]
        more = any(now > before for now, before in zip(available, self._last_available, strict=True))
        if more or not scheduler.running_batch.reqs:
            # SGLang closes admission until something finishes. New memory is a reason to look again, and where nothing
            # runs nothing finishes: what it closed then it would never open.
            scheduler.running_batch.batch_is_full = False
        self._last_available = available

    def planned(self, ahead: bool) -> None:
        """The step is scheduled. ``ahead``: the device still computes it when the results of the one before are
        processed, so that reading there what they free would wait for it."""
        for part in self.parts:
            part.returns.defer = ahead

    def rest(self, scheduler: Any) -> None:
        """The engine is idle: keep only cached prefixes, and fewer of them when others wait for memory."""
        for part in self.parts:
            part.returns.settle(wait=True)
        self.withdraw_wish()
        self.lacks_bytes = 0
        wanted, excess = self._agree_on_pressure(scheduler)
        if wanted > 0:
            self._give_back(scheduler, wanted, excess, [0] * len(self.parts))
        if not self._resting:
            self._resting = True
            self._map_ahead([0] * len(self.parts))
            for part in self.parts:
                part.pool.trim()

    def withdraw_wish(self) -> None:
        """Nothing is missing here, or the model leaves."""
        if self._seat.owner.wished_bytes:
            self._seat.owner.wish(0, 0)

    def _agree_on_pressure(self, scheduler: Any) -> tuple[int, int]:
        """Bytes the account wants back, and the part of it that is above the engine's own limit."""
        owner = self._seat.owner
        wanted, excess, now_ns = int(owner.pressure()), owner.excess(), time.monotonic_ns()
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

    def agree_on_available(self, scheduler: Any) -> None:
        """Behind every change of a lease: all ranks hand out no more than the tightest one can."""
        if self._seat.world == 1:
            return
        least = torch.tensor([part.mine() for part in self.parts], dtype=torch.int64)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group)
        for part, tokens in zip(self.parts, least.tolist(), strict=True):
            part.agree(tokens)

    def _give_back(self, scheduler: Any, wanted: int, excess: int, keeps: Sequence[int]) -> None:
        """First what nothing needs, then cached prefixes; what is above the limit then becomes a target that SGLang
        reaches by retracting."""
        given = self._give_unneeded(keeps, max(0, wanted - self._leaving_bytes()))
        for part in self.parts:
            unit_bytes = -(-part.group.slot_bytes // part.group.slot_tokens)
            while (missing := wanted - given - self._leaving_bytes()) > 0:
                if not evict(scheduler, -(-missing // unit_bytes), part):
                    break
                given += self._give_unneeded(keeps, missing)
        excess = min(excess, wanted - given - self._leaving_bytes())
        if excess > 0:
            grows = [part for part in self.parts if part.group.kind is not GroupKind.STATES]
            max(grows, key=lambda part: int(part.pool.lease_bytes)).shrink(excess)

    def _leaving_bytes(self) -> int:
        return sum(part.leaving_bytes() for part in self.parts)

    def _give_unneeded(self, keeps: Sequence[int], most_bytes: int) -> int:
        given = 0
        for part, keep in zip(self.parts, keeps, strict=True):
            if given < most_bytes:
                given += part.give_back(keep, most_bytes - given)
        return given

    def _grow(self, tree: Any, demands: Sequence[GroupDemand]) -> None:
        """What runs takes what is free; new requests, as many as fit, what no wish that goes first needs."""
        bases = [demand.running + part.scattered() for part, demand in zip(self.parts, demands, strict=True)]
        cached = [part.evictable(tree) for part in self.parts]
        waiting = range(len(demands[0].admissions))

        def fit(index: int, less: Sequence[int]) -> bool:
            needs = (base + demand.admissions[index] for base, demand in zip(bases, demands, strict=True))
            return self._ensure_all([need - part for need, part in zip(needs, less, strict=True)])

        if waiting:
            if fit(waiting[-1], [0] * len(bases)):
                return
            # The engine's own cache makes room for the rest.
            if bisect_left(waiting, True, key=lambda index: not fit(index, cached)):
                return
            # As large as the engine may be: blocks of its own would never do, and nothing that ends would help.
            if not any(demand.running for demand in demands):
                needs = [demand.alone for demand in demands]
                if self._ensure_all([need - own for need, own in zip(needs, cached, strict=True)]):
                    return
        for part, demand, base, own in zip(self.parts, demands, bases, cached, strict=True):
            # With the last, sequences share blocks.
            any(part.ensure(tokens) for tokens in (base, base - own, demand.running))

    def _ensure_all(self, tokens: Sequence[int]) -> bool:
        """Memory for new work, in every group or in none."""
        had: list[tuple[GroupLease, int]] = []
        for part, count in zip(self.parts, tokens, strict=True):
            before = part.mine()
            if not part.ensure(count, yielding=True):
                for grown, kept in had:
                    grown.give_back(kept, _ALL_BYTES)
                return False
            had.append((part, before))
        return True

    def _wish(self, tree: Any, demands: Sequence[GroupDemand]) -> None:
        """Have the account know what is missing beyond this engine's own cache. It stands until the next step says
        otherwise, so that it is there when a neighbour looks, which may be long after."""
        bases = [d.running + p.scattered() - p.evictable(tree) for p, d in zip(self.parts, demands, strict=True)]
        steps = [[base + more for more in (0, *d.admissions)] for base, d in zip(bases, demands, strict=True)]
        missing = [
            sum(lacks)
            for lacks in zip(*(p.missing_bytes(step) for p, step in zip(self.parts, steps, strict=True)), strict=True)
        ]
        missing = [nbytes for nbytes in missing if nbytes > 0]
        self.lacks_bytes = next(iter(missing), 0)
        if missing:
            self._seat.owner.wish(missing[0], missing[-1], self._since_ns)
        else:
            self.withdraw_wish()

    def _map_ahead(self, tokens: Sequence[int]) -> None:
        for part, count in zip(self.parts, tokens, strict=True):
            part.map_ahead(count)


def evict(scheduler: Any, tokens: int, part: GroupLease | None = None) -> bool:
    """Drop up to so many cached tokens (states) of the group, by default the first, that no request uses. False: there
    were none."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    part = scheduler.token_to_kv_pool_allocator.lease.parts[0] if part is None else part
    tokens = min(tokens, part.evictable(scheduler.tree_cache))
    if tokens > 0:
        kind = part.group.kind
        scheduler.tree_cache.evict(
            EvictParams(
                num_tokens=tokens if kind is GroupKind.TOKENS else 0,
                swa_num_tokens=tokens if kind is GroupKind.WINDOW else 0,
                mamba_num=tokens if kind is GroupKind.STATES else 0,
            )
        )
    return tokens > 0
