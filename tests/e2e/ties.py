"""Where two answers to one request part, and how undecided the model was there.

Prefill and decode of different batches add the same numbers in another order: the log-probabilities of one token differ
by up to 1.3e-5 from one batch to the next (measured: tests/e2e/tie_study.py). A greedy answer goes another way only
where the two best tokens are no further apart than that, and so may two runs of any engine that batches. Which batch a
request is in is decided by its neighbours and by retractions, so that a storm, which changes both, shows such places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import openai

from .asks import Answer, Ask

NEAR = 1e-4
"""Difference of two log-probabilities below which rounding may decide: some times what was measured."""
TOP = 5


@dataclass(frozen=True)
class Tie:
    """The place where two answers part: how many tokens they share, and by how much the better was ahead there in an
    undisturbed run (None: it cannot be measured)."""

    shared: int
    gap: float | None
    best: tuple[str, ...] = ()

    @property
    def near(self) -> bool:
        return self.gap is not None and self.gap < NEAR

    def __str__(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:.2e}"
        return f"parts after {self.shared} tokens, the two best ({', '.join(map(repr, self.best))}) are {gap} apart"


async def undecided(client: openai.AsyncOpenAI, ask: Ask, expected: Answer, got: Answer) -> Tie:
    """Asks again, undisturbed and with log-probabilities, and looks where the two answers part. Log-probabilities are
    those after penalties, as the choice was made."""
    if "n" in ask.body or "seed" in ask.body or "tools" in ask.body:
        return Tie(0, None)
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP} if ask.chat else {"logprobs": TOP}
    endpoint = client.chat.completions if ask.chat else client.completions
    reply: Any = await endpoint.create(**{**ask.body, **options})  # type: ignore[call-overload]
    tokens, tops = _tokens(reply.choices[0].logprobs)
    text = ""
    for count, token in enumerate(tokens):
        if not got.text.startswith(text + token):
            ranked = sorted(tops[count].items(), key=lambda pair: -pair[1])
            gap = ranked[0][1] - ranked[1][1] if len(ranked) > 1 else None
            return Tie(count, gap, tuple(name for name, _ in ranked[:2]))
        text += token
    return Tie(len(tokens), None)


def _tokens(logprobs: Any) -> tuple[list[str], list[dict[str, float]]]:
    content = getattr(logprobs, "content", None)
    if content:
        return [e.token for e in content], [{t.token: t.logprob for t in e.top_logprobs} for e in content]
    return list(logprobs.tokens), [dict(top or {}) for top in logprobs.top_logprobs]
