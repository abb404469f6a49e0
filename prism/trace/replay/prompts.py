"""Prompts of the right length, made fast enough to be made on the way.

Text is cut from a pool: a long random sequence of one-token words whose start offsets are known, so a prompt of n words
is one copy of bytes. Where a row has prefix hashes, each block is cut at a place that depends on its hash only: equal
hashes give equal text and different ones different text, whatever row they are in. The rest of the prompt begins with a
few words that spell the row's number, so that no two prompts share a prefix by accident.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from prism.trace.replay.plan import PromptSource
from prism.trace.replay.words import COMMON_WORDS, load_tokenizer, single_token_words
from prism.trace.row import TraceRow

POOL_WORDS: Final = 1 << 16
_ODD: Final = 0x9E3779B97F4A7C15
"""Spreads hashes over the pool (the golden ratio in 64 bits)."""
_TAG_WORDS: Final = 6


class PromptMaker:
    """Prompts for one model. ``block_tokens`` belongs to the trace's prefix hashes."""

    def __init__(self, source: PromptSource, block_tokens: int, seed: int) -> None:
        self._source = source
        self._block_tokens = block_tokens
        if source.tokenizer is None:
            self._words = [word.encode() for word in COMMON_WORDS]
        else:
            path = Path(source.tokenizer)
            self._words = [word.encode() for word in single_token_words(load_tokenizer(path), str(path))]
        rng = random.Random(seed)
        picked = [b" " + word for word in rng.choices(self._words, k=POOL_WORDS)]
        self._pool = b"".join(picked)
        self._starts = [0]
        for word in picked:
            self._starts.append(self._starts[-1] + len(word))

    def words_for(self, tokens: int) -> int:
        """How many words make a prompt that the server counts as ``tokens`` (at least one)."""
        return max(1, round((tokens - self._source.fixed) / self._source.per_word))

    def prompt(self, row: TraceRow, index: int) -> bytes:
        """The prompt of ``row``, the ``index``-th of the replay: ASCII letters and spaces, so it needs no escaping."""
        words = self.words_for(row.prompt_tokens or 1)
        if not row.prefix_hashes:
            return self._unique(index, words)
        per_block = max(1, round(self._block_tokens / self._source.per_word))
        parts: list[bytes] = []
        for block in row.prefix_hashes:
            if words <= 0:
                break
            parts.append(self._cut((block * _ODD) >> 7, min(per_block, words)))
            words -= per_block
        if words > 0:
            parts.append(self._unique(index, words))
        return b"".join(parts)

    def _unique(self, index: int, words: int) -> bytes:
        tag: list[bytes] = []
        left, base = index, len(self._words)
        for _ in range(min(_TAG_WORDS, words)):
            left, digit = divmod(left, base)
            tag.append(b" " + self._words[digit])
            if not left:
                break
        return b"".join(tag) + self._cut(index * _ODD >> 7, words - len(tag))

    def _cut(self, place: int, words: int) -> bytes:
        """``words`` words of the pool from ``place`` on, which wraps."""
        parts: list[bytes] = []
        start = place % POOL_WORDS
        while words > 0:
            end = min(start + words, POOL_WORDS)
            parts.append(self._pool[self._starts[start] : self._starts[end]])
            words -= end - start
            start = 0
        return b"".join(parts)
