"""How many tokens a request may use, for its key's limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

CHARS_PER_TOKEN: Final = 3
"""Texts are counted before they are tokens; most have more characters per token."""


@dataclass(frozen=True, slots=True)
class Demand:
    """``answers`` of at most ``answer_tokens`` each. What they do not use is given back."""

    prompt_tokens: int
    answer_tokens: int
    answers: int
    chosen: bool
    """The client bounded the answer; else the model's context does."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens * self.answers

    def fitting(self, limit_tokens: int) -> int:
        """The longest answer with which the request stays within ``limit_tokens``; less than 1: the prompt alone is
        too long."""
        return (limit_tokens - self.prompt_tokens) // self.answers


def demand_of(adapted: Any, context_tokens: int, tokenizer: Any = None) -> Demand:
    """Of SGLang's ``GenerateReqInput``. Prompts that are texts are estimated, or counted with ``tokenizer``."""
    ids = adapted.input_ids
    rows = ids if ids and isinstance(ids[0], list) else [ids] if ids else adapted.text
    rows = [rows] if isinstance(rows, str) else rows
    params = adapted.sampling_params if isinstance(adapted.sampling_params, dict) else {}
    sizes = [_size(row, tokenizer) for row in rows]
    chosen = params.get("max_new_tokens")
    answer = chosen or max(1, context_tokens - min(sizes))
    return Demand(sum(sizes), answer, (params.get("n") or 1) * len(rows), bool(chosen))


def _size(row: Any, tokenizer: Any) -> int:
    if not isinstance(row, str):
        return len(row)
    return len(tokenizer(row)["input_ids"]) if tokenizer is not None else len(row) // CHARS_PER_TOKEN + 1
