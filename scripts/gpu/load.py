"""One load for two systems: the same prompts, so many at a time, each timed to its first token and to its last."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

OnFirst = Callable[[], None]
Answer = Callable[[Sequence[int], int, OnFirst], Awaitable[int]]
"""``await answer(prompt, new_tokens, on_first)`` calls ``on_first`` at the first token; the number of tokens."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of ``prompt_tokens`` and ``new_tokens``; ``at_once`` stand in the engine at any time."""

    requests: int
    at_once: int
    prompt_tokens: int
    new_tokens: int

    def prompts(self) -> list[list[int]]:
        """No two share a prefix."""
        return [
            [(31 * seed + 13 * i * (seed + 1)) % 1900 + 10 for i in range(self.prompt_tokens)]
            for seed in range(self.requests)
        ]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float


GPU_LOAD = Load(requests=256, at_once=32, prompt_tokens=512, new_tokens=128)
DRY_LOAD = Load(requests=4, at_once=2, prompt_tokens=32, new_tokens=4)


async def measure(load: Load, answer: Answer) -> Outcome:
    """Warm up with as many requests as stand at once, then time all of them."""
    prompts = load.prompts()
    await asyncio.gather(*(answer(p[::-1], load.new_tokens, lambda: None) for p in prompts[: load.at_once]))
    seats, firsts, tokens = asyncio.Semaphore(load.at_once), list[float](), 0

    async def one(prompt: Sequence[int]) -> int:
        async with seats:
            start_s = time.perf_counter()
            return await answer(prompt, load.new_tokens, lambda: firsts.append(time.perf_counter() - start_s))

    start_s = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))
    seconds = time.perf_counter() - start_s
    firsts.sort()
    return Outcome(
        tokens_per_s=tokens / seconds,
        ttft_p50_s=statistics.median(firsts),
        ttft_p99_s=firsts[int(0.99 * (len(firsts) - 1))],
    )
