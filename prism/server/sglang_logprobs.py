"""OpenAI's log-probability objects from SGLang's lists. SGLang's own functions key alternatives by their text, so that
those that are parts of characters fall on each other, and do not know where a token stands."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from sglang.srt.entrypoints.openai import serving_completions
from sglang.srt.entrypoints.openai.protocol import ChatCompletionTokenLogprob, ChoiceLogprobs, LogProbs, TopLogprob

from prism.server.token_text import TokenLogprob

Alternatives = Sequence[Sequence[TokenLogprob] | None]


def chat_logprobs(tokens: Sequence[TokenLogprob], tops: Alternatives) -> ChoiceLogprobs:
    """``tops`` may be empty: no alternatives are wanted."""
    content = []
    for index, token in enumerate(tokens):
        best = (tops[index] or ()) if index < len(tops) else ()
        content.append(
            ChatCompletionTokenLogprob(
                token=token[2] or "",
                bytes=list(token.data),
                logprob=token[0] or 0.0,
                top_logprobs=[TopLogprob(token=t[2] or "", bytes=list(t.data), logprob=t[0] or 0.0) for t in best],
            )
        )
    return ChoiceLogprobs(content=content)


def text_logprobs(
    input_token_logprobs: Sequence[TokenLogprob] | None = None,
    output_token_logprobs: Sequence[TokenLogprob] | None = None,
    input_top_logprobs: Alternatives | None = None,
    output_top_logprobs: Alternatives | None = None,
) -> LogProbs:
    """Takes the place of SGLang's ``to_openai_style_logprobs``."""
    made = LogProbs()
    for token in [*(input_token_logprobs or ()), *(output_token_logprobs or ())]:
        made.tokens.append(token.label)
        made.token_logprobs.append(token[0])
        made.text_offset.append(token.offset)
    for tops in [*(input_top_logprobs or ()), *(output_top_logprobs or ())]:
        made.top_logprobs.append(None if tops is None else _by_label(tops))
    return made


def _by_label(tops: Sequence[TokenLogprob]) -> dict[str, float | None]:
    """A second token with the same text (special ones have none) is told by its id, so that none is lost."""
    found: dict[str, float | None] = {}
    for token in tops:
        found[f"token_id:{token[1]}" if token.label in found else token.label] = token[0]
    return found


def install() -> None:
    """Puts :func:`text_logprobs` where SGLang's text handler looks. Raises ``TypeError`` when SGLang's takes other
    arguments than it was written for."""
    original: Any = serving_completions.to_openai_style_logprobs
    if original is text_logprobs:
        return
    theirs, ours = (set(inspect.signature(f).parameters) for f in (original, text_logprobs))
    if theirs != ours:
        raise TypeError(f"SGLang's to_openai_style_logprobs takes {sorted(theirs)}, Prism's takes {sorted(ours)}")
    serving_completions.to_openai_style_logprobs = text_logprobs
