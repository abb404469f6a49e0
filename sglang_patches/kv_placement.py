"""Whose the next slots are: sequences keep blocks of their own, so that a block runs empty when its sequence ends.

SGLang asks for a number of slots, not for slots of certain requests; the hooks here note the requests of the batch that
is about to ask. Everything is known on the host, so no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prism import memory
from sglang_patches.hooks import Hook, HookKind

MOST_OWN_SLOTS: Final = 64
"""Blocks of more slots are shared by all sequences: one of its own would be mostly empty. On the Arena trace memory
held over needed at p95 is 1.03, 1.05, 1.11, 1.23, 2.07 with own blocks of 16, 32, 64, 128, 512 slots, and 1.28 to 1.45
with shared ones (docs/results/memory.md)."""

Slots = npt.NDArray[np.int64]


def own_blocks(pool: memory.Pool) -> bool:
    """Whether the sequences of this pool keep blocks of their own."""
    return pool.block_slots <= MOST_OWN_SLOTS


class SlotPlacement:
    """Takes slots from one pool for the sequences that were announced, or for nobody in particular.

    Sequences are named by their row of SGLang's request table. Not thread-safe: the scheduler's thread only.
    """

    def __init__(self, pool: memory.Pool, own: bool | None = None) -> None:
        """``own``: whether sequences keep blocks of their own; by default as :func:`own_blocks` says."""
        self._pool = pool
        self._own = own_blocks(pool) if own is None else own
        self._last = np.zeros(0, dtype=np.int64)
        """By row: the last slot of the sequence, 0 if unknown. It may have been given back since, when the prefix
        turned out to be cached already; the pool takes that for a sequence without a block."""
        self._take: Callable[[int], Slots] | None = None
        self._ends: Slots | None = None

    def take(self, count: int) -> Slots:
        """``count`` slots, all or nothing: ``OutOfMemory``."""
        return self._pool.alloc(count) if self._take is None else self._take(count)

    @contextmanager
    def prompts(self, lengths: Sequence[int]) -> Iterator[None]:
        """What is taken inside is for prompts of these lengths, one behind the other; :meth:`remember` says whose."""
        self._ends = None
        with self._announced(lambda count: self._take_prompts(lengths, count)):
            yield

    @contextmanager
    def steps(self, rows: Slots) -> Iterator[None]:
        """What is taken inside is one more slot for each of these sequences."""
        with self._announced(lambda count: self._take_steps(rows, count)):
            yield

    def remember(self, rows: Slots, table_rows: int) -> None:
        """The prompts taken last are of these sequences, in this order; the request table has so many rows."""
        if len(self._last) < table_rows:
            self._last = np.zeros(table_rows, dtype=np.int64)
        self._last[rows] = 0 if self._ends is None else self._ends

    @contextmanager
    def _announced(self, take: Callable[[int], Slots]) -> Iterator[None]:
        self._take = take if self._own else None
        try:
            yield
        finally:
            self._take = None

    def _take_prompts(self, lengths: Sequence[int], count: int) -> Slots:
        if sum(lengths) != count:
            return self._pool.alloc(count)
        slots = np.empty(count, dtype=np.int64)
        done = 0
        try:
            for length in lengths:
                self._pool.alloc_into(slots[done : done + length], fresh=True)
                done += length
        except memory.errors.DeviceMemoryError:
            self._pool.free(slots[:done])
            raise
        self._ends = slots[np.cumsum(lengths) - 1]
        return slots

    def _take_steps(self, rows: Slots, count: int) -> Slots:
        if len(rows) != count:
            return self._pool.alloc(count)
        slots = self._pool.alloc_after(self._last[rows])
        self._last[rows] = slots
        return slots


def place_prompts(original: Callable[..., Any], batch: Any) -> Any:
    """Around ``alloc_for_extend``, which returns the slots and, twice, the rows of the batch's requests."""
    placement: SlotPlacement = batch.token_to_kv_pool_allocator.placement
    with placement.prompts(batch.extend_lens):
        result = original(batch)
    placement.remember(result[2].numpy(), len(batch.req_to_token_pool.req_to_token))
    return result


def place_steps(original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
    """Around ``alloc_for_decode``."""
    placement: SlotPlacement = batch.token_to_kv_pool_allocator.placement
    rows = np.fromiter((req.req_pool_idx for req in batch.reqs), dtype=np.int64, count=len(batch.reqs))
    with placement.steps(rows):
        return original(batch, token_per_req)


HOOKS = (
    Hook(
        "sglang.srt.managers.schedule_batch.alloc_for_extend",
        HookKind.AROUND,
        place_prompts,
        ("batch",),
        "a prompt starts in a block of its own",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.alloc_for_decode",
        HookKind.AROUND,
        place_steps,
        ("batch", "token_per_req"),
        "a sequence goes on in its own block",
    ),
)
