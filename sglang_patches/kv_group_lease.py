"""One group's part of the engine's lease: how much it holds, needs and can give, in tokens (or states)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from prism.memory import GroupKind, KvGroup
from sglang_patches.kv_demand import GroupDemand, demand_states, demand_tokens, demand_window
from sglang_patches.kv_placement import own_blocks
from sglang_patches.kv_returns import SlotReturns

STATES_PER_REQUEST: Final = 3
"""SGLang evicts until a request that starts could have so many (``MAMBA_STATE_PER_REQ_PREFIX_CACHE``): its own, and two
that the prefix cache takes from it."""


class GroupLease:
    """Decides nothing: :class:`~sglang_patches.kv_lease.KvLease` does, for all groups of the engine together."""

    def __init__(self, group: KvGroup, returns: SlotReturns | None = None) -> None:
        """``returns``: its slots that come back."""
        self.group, self.pool = group, group.pool
        self.returns = SlotReturns(group.pool) if returns is None else returns
        self._own = group.kind is not GroupKind.STATES and own_blocks(group.pool)
        self._spread = 0
        """Slots this rank could still hand out beyond what the tightest rank can."""
        self._ahead_bytes = 0

    def available(self) -> int:
        """What can be handed out for certain, on every rank alike."""
        return max(0, self.mine() - self._spread)

    def mine(self) -> int:
        """The same on this rank."""
        slots = min(int(self.pool.available()), self._most_slots - int(self.pool.used()))
        return slots * self.group.slot_tokens

    def agree(self, least: int) -> None:
        """``least``: what the tightest rank can hand out."""
        self._spread = self.mine() - least

    def used(self) -> int:
        return int(self.pool.used()) * self.group.slot_tokens

    def scattered(self) -> int:
        """Free in blocks that sequences keep for themselves: new ones need others."""
        return int(self.pool.scattered()) * self.group.slot_tokens if self._own else 0

    def demand(self, scheduler: Any) -> GroupDemand:
        page = self.group.slot_tokens
        block = int(self.pool.block_slots) * page if self._own else page
        match self.group.kind:
            case GroupKind.TOKENS:
                return demand_tokens(scheduler, block, page)
            case GroupKind.WINDOW:
                return demand_window(scheduler, block, page)
            case GroupKind.STATES:
                cached = scheduler.tree_cache.supports_mamba()
                return demand_states(scheduler, STATES_PER_REQUEST if cached else 1)

    def ensure(self, tokens: int, yielding: bool = False) -> bool:
        """Grow until so many are available, at most the whole pool."""
        return bool(self.pool.ensure(self._slots_within(tokens), yielding=yielding))

    def back(self, scheduler: Any, demand: GroupDemand) -> None:
        """Have pages behind all that the step may take of what is needed. A device that is full in spite of its account
        (others use it too) then says so here: the lease shrinks and SGLang retracts; within the step it would crash."""
        tokens = demand.running + (demand.admissions[-1] if demand.admissions else 0)
        block = int(self.pool.block_slots) if self._own else 1
        chunk = int(scheduler.chunked_prefill_size or scheduler.max_prefill_tokens)
        most = -(-chunk // self.group.slot_tokens) + int(scheduler.max_running_requests) * block
        self.pool.back(min(-(-tokens // self.group.slot_tokens), most), self._own)

    def kept(self, demand: GroupDemand, above_limit: bool) -> int:
        """What is not given up for others, unused as it is: what runs needs it next. Above the limit SGLang retracts
        for want of slots, but it takes it for granted that a state can be had for what it has let in."""
        if above_limit and self.group.kind is not GroupKind.STATES:
            return 0
        return demand.running + self.scattered()

    def give_back(self, keep: int, most_bytes: int) -> int:
        """Give up what is not in use but for ``keep`` tokens; the bytes that the account got back."""
        return int(self.pool.give_back(-(-keep // self.group.slot_tokens), most_bytes))

    def shrink(self, nbytes: int) -> None:
        """Aim at a lease smaller by so much, which SGLang reaches by retracting."""
        self.pool.set_lease(max(0, int(self.pool.lease_bytes) - nbytes))

    def leaving_bytes(self) -> int:
        """What goes back as soon as the steps in flight, which may read it, are over: nothing more is due for it."""
        now = self.pool.stats()
        return min(int(now["lease_bytes"] - now["target_bytes"]), int(now["deferred_bytes"]))

    def missing_bytes(self, tokens: Sequence[int]) -> list[int]:
        """What the lease lacks until so many are available, for each of them, in whole blocks."""
        slots, most = self.mine() // self.group.slot_tokens, self._slots_within(1 << 62)
        wanted = (min(-(-max(each, 0) // self.group.slot_tokens), most) for each in tokens)
        return [self._bytes(each - slots) if each > slots else 0 for each in wanted]

    def map_ahead(self, tokens: int) -> None:
        """Have so much of the lease mapped while the device computes, so that the next steps find their pages there.
        It is held already, and goes like any other part of the lease that nothing uses: before cached prefixes."""
        wanted = self._bytes(-(-tokens // self.group.slot_tokens))
        if wanted != self._ahead_bytes:
            self.pool.set_ahead(wanted, None)
            self._ahead_bytes = wanted

    def evictable(self, tree: Any) -> int:
        """What the prefix cache holds of this group and no request uses."""
        match self.group.kind:
            case GroupKind.TOKENS:
                return int(tree.evictable_size())
            case GroupKind.WINDOW:
                return int(tree.swa_evictable_size())
            case GroupKind.STATES:
                return int(tree.mamba_evictable_size()) if tree.supports_mamba() else 0

    @property
    def _most_slots(self) -> int:
        return self.group.max_tokens // self.group.slot_tokens

    def _slots_within(self, tokens: int) -> int:
        slots = -(-max(tokens, 0) // self.group.slot_tokens)
        return min(slots, self._most_slots - int(self.pool.used()))

    def _bytes(self, slots: int) -> int:
        """Whole blocks with so many slots."""
        return -(-slots // int(self.pool.block_slots)) * int(self.pool.block_bytes)
