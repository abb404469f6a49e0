"""How much of an engine's work one step takes on while its device has no room for all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_CHUNK_TOKENS: Final = 128
"""A prompt is prefilled in no smaller pieces; a multiple of every page of tokens."""
CALM_STEPS: Final = 256
"""After so many steps that found room, the next ones take on twice as much."""


@dataclass
class StepWidth:
    """``most_chunk_tokens``: None where prompts are prefilled whole. Halved by each step that finds no room, doubled by
    :data:`CALM_STEPS` that do. No clock, no SGLang: who runs the steps reads ``chunk_tokens`` and ``rows``."""

    most_chunk_tokens: int | None
    most_rows: int

    def __post_init__(self) -> None:
        self.widen_fully()

    def widen_fully(self) -> None:
        self.chunk_tokens, self.rows, self._calm = self.most_chunk_tokens, self.most_rows, 0

    @property
    def is_full(self) -> bool:
        return self.chunk_tokens == self.most_chunk_tokens and self.rows == self.most_rows

    def failed(self, rows: int, prefill_tokens: int) -> bool:
        """A step of so many requests found no room; it computed ``prefill_tokens`` of prompts (0: it decoded). The next
        ones are smaller. False: there is no smaller step."""
        self._calm = 0
        if self.chunk_tokens is not None and prefill_tokens > LEAST_CHUNK_TOKENS:
            half = prefill_tokens // 2 // LEAST_CHUNK_TOKENS * LEAST_CHUNK_TOKENS
            self.chunk_tokens = max(LEAST_CHUNK_TOKENS, min(half, self.chunk_tokens))
            return True
        if rows > 1:
            self.rows = rows // 2
            return True
        return False

    def found_room(self) -> bool:
        """A step ran. True: the next ones may be larger than those before."""
        if self.is_full:
            return False
        self._calm += 1
        if self._calm < CALM_STEPS:
            return False
        self._calm, self.rows = 0, min(self.most_rows, 2 * self.rows)
        if self.chunk_tokens is not None and self.most_chunk_tokens is not None:
            self.chunk_tokens = min(self.most_chunk_tokens, 2 * self.chunk_tokens)
        return True
