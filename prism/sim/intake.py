"""Which requests enter an engine's next prefill step: SGLang's rules.

Requests enter in order of arrival while the batch has room and the memory rule holds: their tokens and their whole
answer must fit beside ``ratio`` times what the running ones still have to make. ``ratio`` falls from
:data:`RATIO_START` to :data:`RATIO_LEAST` while decoding goes well. After a refusal for memory nobody enters until a
request leaves or memory comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prism.policy.kv_ahead import beyond_next_steps, entering_tokens, next_steps_tokens
from prism.sim.batch import DecodeBatch
from prism.sim.job import Job
from prism.sim.kv import KvMemory

RATIO_START: Final = 0.7
RATIO_LEAST: Final = 0.098
RATIO_STEP: Final = (RATIO_START - RATIO_LEAST) / 600
"""SGLang's defaults: the expected part of the remaining answers falls to its least within 600 decode steps."""
CLIP_ANSWER_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Settings of the engine that are the same for all models of a device."""

    chunk_tokens: int = 8192
    max_running: int = 256
    fast: bool = True
    """Take decode steps of an unchanged batch together."""


class EngineIntake:
    """Requests inside an engine that do not decode yet. Owned by the engine."""

    __slots__ = ("_batch", "_kv", "_limits", "_ratio", "chunked", "hungry", "waiting")

    def __init__(self, limits: EngineLimits, kv: KvMemory, batch: DecodeBatch) -> None:
        self._limits, self._kv, self._batch = limits, kv, batch
        self.waiting: deque[Job] = deque()
        self.chunked: Job | None = None
        """The job whose prompt is prefilled in part."""
        self.hungry = False
        """The first waiting job was refused for memory."""
        self._ratio = RATIO_START

    def reset_ratio(self) -> None:
        self._ratio = RATIO_START

    def decoded(self, steps: int) -> None:
        """``steps`` decode steps went well."""
        self._ratio = max(RATIO_LEAST, self._ratio - RATIO_STEP * steps)

    def retracted(self, job: Job) -> None:
        """``job`` was thrown out of the batch for want of memory."""
        self.waiting.appendleft(job)
        self.hungry = True
        self._ratio = RATIO_START

    def fill(self) -> list[tuple[Job, int]]:
        """The next prefill step: jobs and how many tokens of each. Empty when nobody may enter."""
        items: list[tuple[Job, int]] = []
        budget = self._limits.chunk_tokens
        if self.chunked is not None:
            budget -= self._add(self.chunked, budget, items)
        while budget > 0 and self.waiting and not self.hungry:
            if len(self._batch) + len(items) >= self._limits.max_running:
                break
            if not self._take_in(self.waiting[0], alone=not self._batch.jobs and not items):
                self.hungry = True
                break
            budget -= self._add(self.waiting.popleft(), budget, items)
        return items

    def ahead_tokens(self, items: Sequence[tuple[Job, int]]) -> int:
        """Tokens that the engine has mapped beyond those in use before a prefill step of ``items``, whose prompts are
        in use already: at most what one step can take in, prompts counted."""
        steps = next_steps_tokens(len(self._batch))
        beyond = beyond_next_steps((self._batch.remaining_tokens,), self._ratio, steps)
        prompts = sum([job.kv_tokens for job, _ in items])
        entering = sum([entering_tokens(job.kv_tokens, min(job.remaining, CLIP_ANSWER_TOKENS)) for job, _ in items])
        most = self._limits.chunk_tokens + self._limits.max_running
        return max(steps, min(steps + beyond + entering, most) - prompts)

    def _add(self, job: Job, budget: int, items: list[tuple[Job, int]]) -> int:
        chunk = min(job.left_tokens, budget)
        items.append((job, chunk))
        return chunk

    def _take_in(self, job: Job, alone: bool) -> bool:
        """Give ``job`` its memory. False (and nothing changed) when the memory rule does not hold."""
        kv = self._kv
        cache, tokens = kv.cache, job.prompt_tokens + job.generated
        hit = list(job.blocks[: cache.match(job.blocks)]) if job.blocks else []
        if hit:  # hold first, so that making room cannot evict them
            kv.from_cache(cache.hold(hit))
        need = max(1, tokens - len(hit) * cache.block_tokens)
        if not self._fits(need, job, alone) or not kv.grow(need):
            if hit:
                kv.to_cache(cache.release(hit))
            return False
        cached = min(len(hit) * cache.block_tokens, tokens - 1)
        cache.hit_tokens += cached
        cache.looked_up_tokens += tokens
        job.held_blocks = hit
        job.kv_tokens, job.computed_tokens, job.left_tokens = need, cached, tokens - cached
        return True

    def _fits(self, need: int, job: Job, alone: bool) -> bool:
        answer = min(job.remaining, CLIP_ANSWER_TOKENS)
        want = need + answer + self._ratio * self._batch.remaining_tokens
        if want <= self._kv.room_tokens():
            return True
        available = self._kv.available_tokens()
        return need + 1 <= available if alone else want <= available
