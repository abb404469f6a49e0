"""ShareGPT (``[{"id", "conversations": [{"from": "human"|"gpt", "value"}]}]``): texts without times.

Conversations start as a Gamma renewal process; each further turn follows after the answer's time at a reading speed
drawn from an exponential. The prompt of a turn is the whole conversation so far, so turns of one session share
prefixes: block ``i`` of session ``s`` has the id ``s * 2**20 + i``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from prism.core.errors import InvalidValue
from prism.trace.convert.base import Converter, ConvertOptions, Tally
from prism.trace.convert.json_array import json_array
from prism.trace.row import TraceRow

BLOCK_TOKENS: Final = 64
MOST_BLOCKS: Final = 1 << 20
_USER: Final = ("human", "user")
_MODEL: Final = ("gpt", "chatgpt", "assistant", "bard", "bing")

Count = Callable[[str], int]


def _rows(path: Path, options: ConvertOptions, tally: Tally) -> Iterator[TraceRow]:
    if options.rate_rps is None:
        raise InvalidValue("rate_rps", None, "ShareGPT has no times: give the conversations per second")
    for name in ("rate_rps", "cv", "think_s", "chars_per_token"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidValue(name, value, "must be positive")
    count, rng = _counter(options), np.random.default_rng(options.seed)
    shape, start_s, pending = 1 / options.cv**2, 0.0, list[tuple[float, int, int, TraceRow]]()
    for index, item in enumerate(json_array(path)):
        turns = _turns(item, f"{path} row {index}")
        if not turns:
            tally.drop("no question with an answer")
            continue
        while pending and pending[0][0] <= start_s:
            yield heapq.heappop(pending)[3]
        for turn, row in enumerate(_session(turns, start_s, index, options, count, rng)):
            heapq.heappush(pending, (row.arrival_s, index, turn, row))
        start_s += float(rng.gamma(shape, 1 / (options.rate_rps * shape)))
    while pending:
        yield heapq.heappop(pending)[3]


def _turns(item: Any, where: str) -> list[tuple[str, str]]:
    """Question and answer pairs of one conversation."""
    messages = item.get("conversations", item.get("items")) if isinstance(item, dict) else None
    if not isinstance(messages, list):
        raise InvalidValue(
            "conversations", item if not isinstance(item, dict) else list(item), "is missing", where=where
        )
    turns, question = [], None
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidValue("conversations", message, "must hold objects with 'from' and 'value'", where=where)
        speaker, text = message.get("from"), message.get("value")
        if not isinstance(text, str):
            raise InvalidValue("value", text, "must be a string", where=where)
        if speaker in _USER:
            question = text
        elif speaker in _MODEL and question and text:
            turns.append((question, text))
            question = None
    return turns


def _session(
    turns: list[tuple[str, str]],
    start_s: float,
    index: int,
    options: ConvertOptions,
    count: Count,
    rng: np.random.Generator,
) -> Iterator[TraceRow]:
    at_s, history = start_s, 0
    for question, answer in turns:
        prompt, output = history + max(1, count(question)), max(1, count(answer))
        blocks = range(min(-(-prompt // BLOCK_TOKENS), MOST_BLOCKS))
        yield TraceRow(at_s, options.model, prompt, output, f"s{index}", tuple(index * MOST_BLOCKS + b for b in blocks))
        history = prompt + output
        at_s += float(rng.exponential(options.think_s))


def _counter(options: ConvertOptions) -> Count:
    if options.tokenizer is not None:
        from prism.trace.replay.words import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    if options.chars_per_token is None:
        raise InvalidValue(
            "tokenizer", None, "ShareGPT has texts: give a tokenizer, or characters per token to estimate"
        )
    per_token = options.chars_per_token
    return lambda text: round(len(text) / per_token)


SHAREGPT = Converter(
    "sharegpt", "ShareGPT JSON (texts; needs --rate-rps and a tokenizer or --chars-per-token)", _rows, BLOCK_TOKENS
)
