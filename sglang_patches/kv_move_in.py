"""Stored KV on its way into an engine: taken slots, a thread that fills them, and then the tree."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_patches.kv_demand import demand_tokens
from sglang_patches.kv_lease import evict
from sglang_patches.seat import KvStore

_BESIDE_BYTES: Final = 1 << 20
"""What is smaller is brought in at once, also beside running requests: a thread costs more."""


@dataclass
class _Coming:
    """Tokens ``have .. end`` of a sequence on their way into ``slots``; those before them are locked in the tree."""

    tokens: array[int]
    adapter: str | None
    have: int
    end: int
    prefix: torch.Tensor
    slots: torch.Tensor
    node: Any
    result: Future[int]


class KvMoves:
    """What is on its way into one scheduler's tree."""

    def __init__(self, scheduler: Any, store: KvStore) -> None:
        self._scheduler, self._store = scheduler, store
        self._tree, self._allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        self._seat = self._allocator.get_kvcache().prism_seat
        self._thread: ThreadPoolExecutor | None = None
        self.coming: dict[str, _Coming] = {}
        """By the id of the request that waits for it."""

    def settle(self) -> None:
        """What has come goes into the tree; what nobody waits for any more is waited for here, since nothing else may
        hold slots outside of the tree and of requests when the engine rests."""
        waiting = {req.rid for req in self._scheduler.waiting_queue}
        for rid, coming in list(self.coming.items()):
            if coming.result.done() or rid not in waiting:
                del self.coming[rid]
                self._land(coming, coming.result.result())

    def look(self, running: bool) -> None:
        """Begin to bring what is stored of requests that are about to be admitted. ``running``: others' steps go on."""
        if getattr(self._scheduler, "prism_fair", None) is not None:
            self._look_at(self._scheduler.waiting_queue, running)
            return
        lease = self._allocator.lease
        room = lease.available_tokens() + int(self._tree.evictable_size())
        demand = demand_tokens(self._scheduler, 1)
        fitting = sum(demand.running + needed <= room for needed in demand.admissions)
        self._look_at(self._scheduler.waiting_queue[:fitting], running)

    def _look_at(self, queue: Sequence[Any], running: bool) -> None:
        for req in queue:
            tokens = req.origin_input_ids + req.output_ids
            plain = (
                req.input_embeds is None and req.multimodal_inputs is None
            )  # others' tokens do not say what they are
            if plain and getattr(req, "prism_looked", 0) != len(tokens):
                if not self._look_for(req, tokens[: len(tokens) - 1], running):
                    return
                req.prism_looked = len(tokens)

    def _look_for(self, req: Any, tokens: array[int], running: bool) -> bool:
        """``tokens``: all but the last, which is always computed. False: there are no slots now for what is stored."""
        adapter = req.extra_key
        match = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(token_ids=tokens, extra_key=adapter)))
        have = len(match.device_indices)
        end = self.agree(self._store.reach(tokens, adapter or "", have))
        if end <= have:
            return True
        node = match.last_device_node
        self._tree.inc_lock_ref(node)
        slots = self._take(end - have)
        if slots is None:
            self._tree.dec_lock_ref(node)
            return False
        coming = _Coming(tokens, adapter, have, end, match.device_indices, slots, node, Future())
        if running and self._seat.world == 1 and len(slots) * self._allocator.lease.token_bytes > _BESIDE_BYTES:
            coming.result = self._beside().submit(self._fetch, coming)
            self.coming[req.rid] = coming
        else:
            self._land(coming, self.agree(self._fetch(coming)))
        return True

    def _take(self, count: int) -> torch.Tensor | None:
        missing = count - self._allocator.available_size()
        if missing > 0:
            evict(self._scheduler, missing)
        slots: torch.Tensor | None = self._allocator.alloc(count)
        return slots

    def _fetch(self, coming: _Coming) -> int:
        rows = coming.slots.cpu().numpy()
        return self._store.fetch(coming.tokens, coming.adapter or "", coming.have, coming.end, rows)

    def _land(self, coming: _Coming, reached: int) -> None:
        """Tokens up to ``reached`` are verified and in their slots: put them into the tree. Slots of tokens that
        another request has computed meanwhile are free again."""
        count = reached - coming.have
        if count < len(coming.slots):
            self._allocator.free(coming.slots[count:])
        if count > 0:
            key = RadixKey(token_ids=coming.tokens[:reached], extra_key=coming.adapter)
            value = torch.cat([coming.prefix, coming.slots[:count]])
            known = self._tree.insert(InsertParams(key=key, value=value)).prefix_len - coming.have
            if known > 0:
                self._allocator.free(coming.slots[:known])
        self._tree.dec_lock_ref(coming.node)

    def agree(self, count: int) -> int:
        """The least of what tensor-parallel ranks have: all of them must schedule alike."""
        if self._seat.world == 1:
            return count
        least = torch.tensor([count], dtype=torch.int64)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._scheduler.tp_cpu_group)
        return int(least[0])

    def _beside(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-in")
        return self._thread

    def close(self) -> None:
        """The engine is about to give its memory up: nothing may write into it any more."""
        for coming in self.coming.values():
            self._land(coming, coming.result.result())
        self.coming.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def without(scheduler: Any, held: Collection[str], run: Callable[[], Any]) -> Any:
    """``run()`` while the requests ``held`` (by id) are not in the waiting queue."""
    if not held:
        return run()
    before = scheduler.waiting_queue
    scheduler.waiting_queue = [req for req in before if req.rid not in held]
    try:
        return run()
    finally:
        after = scheduler.waiting_queue
        left = {req.rid for req in after}
        known = {req.rid for req in before}
        scheduler.waiting_queue = [req for req in before if req.rid in held or req.rid in left]
        scheduler.waiting_queue += [req for req in after if req.rid not in known]
