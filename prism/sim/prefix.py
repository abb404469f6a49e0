"""The prefix cache of one engine: blocks of prompts that stay in KV memory after their request, least recently used out
first.

Blocks are named by the trace (equal id: equal text up to and including the block). A prompt hits the longest run of its
first blocks that are present. Only whole blocks are kept; answers and the rest of a prompt leave with their request.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCache:
    """Counts in tokens. A block is *held* while a running request uses it, else idle and evictable."""

    __slots__ = ("_holders", "_idle", "block_tokens", "hit_tokens", "idle_tokens", "looked_up_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}
        """Blocks nobody holds, least recently used first."""
        self.idle_tokens = 0
        self.hit_tokens = 0
        self.looked_up_tokens = 0

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first ``blocks`` are present."""
        count = 0
        for block in blocks:
            if block not in self._holders:
                break
            count += 1
        return count

    def hold(self, blocks: Sequence[int]) -> int:
        """Hold present ``blocks``; returns the tokens that were idle before and are in use now."""
        woken = 0
        for block in blocks:
            if self._holders[block] == 0:
                del self._idle[block]
                woken += self.block_tokens
            self._holders[block] += 1
        self.idle_tokens -= woken
        return woken

    def insert(self, blocks: Sequence[int]) -> list[int]:
        """Blocks that a request has just computed; returns those that are now in the cache and held by it (others had
        put the rest there meanwhile, so that the request's own copies stay private)."""
        new = [block for block in blocks if block not in self._holders]
        for block in new:
            self._holders[block] = 1
        return new

    def release(self, blocks: Sequence[int]) -> int:
        """Let go of held ``blocks``; returns the tokens that are idle from now on."""
        slept = 0
        for block in reversed(blocks):  # the end of a prompt is less likely to be shared than its beginning
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._idle[block] = None
                slept += self.block_tokens
        self.idle_tokens += slept
        return slept

    def evict(self, tokens: int) -> int:
        """Forget idle blocks until at least ``tokens`` are free; returns how many became free."""
        freed = 0
        while freed < tokens and self._idle:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._holders[block]
            freed += self.block_tokens
        self.idle_tokens -= freed
        return freed
