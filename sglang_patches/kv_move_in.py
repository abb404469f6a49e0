"""Stored KV on its way into an engine: taken slots, a thread that fills them, and then the tree."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

from sglang_patches.kv_demand import demand_tokens
from sglang_patches.kv_move_trees import moved_tree
from sglang_patches.seat import KvStore

_BESIDE_BYTES: Final = 1 << 20
"""What is smaller is brought in at once, also beside running requests: a thread costs more."""
_ASKED_AGAIN: Final = 4
"""Ranks that have lost different points of a sequence agree on one that all have, or compute it."""


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
    lock: Any
    point_tokens: int
    result: Future[int]


class KvMoves:
    """What is on its way into one scheduler's tree."""

    def __init__(self, scheduler: Any, store: KvStore) -> None:
        self._scheduler, self._store = scheduler, store
        self._tree, self._allocator = moved_tree(scheduler), scheduler.token_to_kv_pool_allocator
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
        room = lease.available_tokens() + int(self._scheduler.tree_cache.evictable_size())
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
        prefix, node = self._tree.match(tokens, adapter)
        have = len(prefix)
        end = self._agreed_end(tokens, adapter or "", have)
        if end <= have:
            return True
        lock, needed = self._tree.lock(node), self._store.point_tokens(have, end)
        slots = self._tree.take(end - have, needed)
        if slots is None:
            self._tree.unlock(node, lock)
            return False
        coming = _Coming(tokens, adapter, have, end, prefix, slots, node, lock, needed, Future())
        if running and self._seat.world == 1 and len(slots) * self._allocator.lease.token_bytes > _BESIDE_BYTES:
            coming.result = self._beside().submit(self._fetch, coming)
            self.coming[req.rid] = coming
        else:
            self._land(coming, self.agree(self._fetch(coming)))
        return True

    def _agreed_end(self, tokens: array[int], adapter: str, have: int) -> int:
        """How far ``tokens`` are brought: as far as every rank has them."""
        end = len(tokens)
        for _ in range(_ASKED_AGAIN):
            mine = self._store.reach(tokens[:end], adapter, have)
            end = self.agree(mine)
            if end <= have or self.agree(int(mine == end)):
                return max(end, have)
        return have

    def _fetch(self, coming: _Coming) -> int:
        rows = coming.slots.cpu().numpy()
        return self._store.fetch(coming.tokens, coming.adapter or "", coming.have, coming.end, rows)

    def _land(self, coming: _Coming, reached: int) -> None:
        """Tokens up to ``reached`` are verified and in their slots: put them into the tree."""
        count = reached - coming.have
        self._tree.give_up(coming.slots[count:], coming.point_tokens)
        if count > 0:
            tokens, slots = coming.tokens[:reached], coming.slots[:count]
            self._tree.insert(tokens, coming.adapter, coming.prefix, slots, coming.point_tokens)
        self._tree.unlock(coming.node, coming.lock)

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
