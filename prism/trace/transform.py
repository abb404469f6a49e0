"""Changes of a trace: streams of rows in, streams of rows out, in order of arrival.

Randomness comes from the ``seed`` given, so that the same call gives the same rows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from prism.core.errors import InvalidValue
from prism.trace.lengths import LengthTable
from prism.trace.row import TraceRow

COPY_STRIDE: Final = 1 << 40
"""Added to the prefix ids of each copy, so that copies share no text with their original or each other."""


def window(rows: Iterable[TraceRow], start_s: float, end_s: float = math.inf) -> Iterator[TraceRow]:
    """The rows of ``[start_s, end_s)``, with times counted from ``start_s``."""
    if not 0 <= start_s < end_s:
        raise InvalidValue("window", (start_s, end_s), "needs 0 <= start < end")
    for row in rows:
        if row.arrival_s >= end_s:
            return
        if row.arrival_s >= start_s:
            yield replace(row, arrival_s=row.arrival_s - start_s)


def scale_time(rows: Iterable[TraceRow], factor: float) -> Iterator[TraceRow]:
    """The same requests with all times multiplied by ``factor``: 2 makes the trace twice as long at half the rate."""
    _positive("time factor", factor)
    return (replace(row, arrival_s=row.arrival_s * factor) for row in rows)


def scale_lengths(
    rows: Iterable[TraceRow],
    prompt: float = 1.0,
    output: float = 1.0,
    *,
    most_prompt: int | None = None,
    most_output: int | None = None,
    most_total: int | None = None,
) -> Iterator[TraceRow]:
    """Lengths multiplied (at least 1 token stays) and cut: prompts to ``most_prompt``, outputs to ``most_output``, then
    prompt + output to ``most_total`` at the cost of the prompt. The caller scales ``TraceInfo.block_tokens`` by
    ``prompt`` (:func:`scaled_block_tokens`) so that prefixes stay shared."""
    _positive("prompt factor", prompt)
    _positive("output factor", output)
    limits = (("most_prompt", most_prompt, 1), ("most_output", most_output, 1), ("most_total", most_total, 2))
    for name, most, least in limits:
        if most is not None and most < least:
            raise InvalidValue(name, most, f"must be at least {least}")
    for row in rows:
        p = _scaled(row.prompt_tokens, prompt, most_prompt)
        o = _scaled(row.output_tokens, output, most_output)
        if most_total is not None and p is not None and o is not None and p + o > most_total:
            o = min(o, most_total - 1)
            p = min(p, most_total - o)
        yield replace(row, prompt_tokens=p, output_tokens=o)


def scaled_block_tokens(block_tokens: int, prompt: float) -> int:
    """The block size that belongs to prompts scaled by ``prompt``."""
    return max(1, round(block_tokens * prompt))


def _scaled(tokens: int | None, factor: float, most: int | None) -> int | None:
    if tokens is None:
        return None
    scaled = max(1, round(tokens * factor))
    return scaled if most is None else min(scaled, most)


def change_rate(rows: Iterable[TraceRow], factor: float, seed: int, most_jitter_s: float = 5.0) -> Iterator[TraceRow]:
    """``factor`` times as many requests over the same time, with the same pattern over time and models.

    Every row comes ``factor`` times on average (the fraction by a coin). The first copy keeps its time; others follow
    within the model's last gap, at most ``most_jitter_s``: so bursts stay bursts and idle intervals stay idle. Copies
    are conversations of their own (session and prefix ids differ). Memory holds the copies of the next few seconds.
    """
    _positive("rate factor", factor)
    rng = np.random.default_rng(seed)
    last_s: dict[str, float] = {}
    later: list[tuple[float, int, TraceRow]] = []
    made = 0
    for row in rows:
        while later and later[0][0] <= row.arrival_s:
            yield heapq.heappop(later)[2]
        copies = int(factor) + int(rng.random() < factor % 1)
        spread_s = min(row.arrival_s - last_s.get(row.model, -math.inf), most_jitter_s)
        last_s[row.model] = row.arrival_s
        if copies:
            yield row
        for index in range(1, copies):
            made += 1
            copy = _copy(row, index, row.arrival_s + spread_s * float(rng.random()))
            heapq.heappush(later, (copy.arrival_s, made, copy))
    while later:
        yield heapq.heappop(later)[2]


def _copy(row: TraceRow, index: int, arrival_s: float) -> TraceRow:
    session = None if row.session is None else f"{row.session}#{index}"
    hashes = tuple(h + index * COPY_STRIDE for h in row.prefix_hashes)
    return replace(row, arrival_s=arrival_s, session=session, prefix_hashes=hashes)


def rename_models(rows: Iterable[TraceRow], names: Mapping[str, str]) -> Iterator[TraceRow]:
    """Every model replaced by ``names[model]``. Raises :class:`InvalidValue` for a model that is not in ``names``."""
    for index, row in enumerate(rows):
        if row.model not in names:
            raise InvalidValue("model", row.model, "is in no mapping", sorted(names), where=f"row {index}")
        yield replace(row, model=names[row.model])


def fold(requests: Mapping[str, int], targets: Sequence[str], how: str = "rank") -> dict[str, str]:
    """Which of ``targets`` each of more models becomes, given their numbers of ``requests``. ``rank``: the i-th most
    popular becomes target ``i mod m`` (keeps the skew); ``balance``: heaviest first onto the least loaded target."""
    if not 1 <= len(targets) <= len(requests):
        raise InvalidValue("models", len(targets), f"must be between 1 and the trace's {len(requests)} models")
    ranked = sorted(requests, key=lambda m: (-requests[m], m))
    if how == "rank":
        return {model: targets[i % len(targets)] for i, model in enumerate(ranked)}
    if how != "balance":
        raise InvalidValue("fold", how, "unknown way to fold models", ["rank", "balance"])
    loads, chosen = dict.fromkeys(targets, 0), {}
    for model in ranked:
        chosen[model] = min(loads, key=loads.__getitem__)
        loads[chosen[model]] += requests[model]
    return chosen


def split(rows: Iterable[TraceRow], targets: Sequence[str], exponent: float, seed: int) -> Iterator[TraceRow]:
    """Rows dealt at random to ``targets`` with Zipf popularity; requests of one session stay together. For sources with
    one model. Sessions seen are remembered."""
    rng = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, len(targets) + 1, dtype=np.float64) ** -exponent)
    homes: dict[str, str] = {}
    for row in rows:
        target = targets[int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))]
        if row.session is not None:
            target = homes.setdefault(row.session, target)
        yield replace(row, model=target)


def fill_lengths(rows: Iterable[TraceRow], table: LengthTable, seed: int) -> Iterator[TraceRow]:
    """Unknown lengths drawn from ``table``; known ones stay."""
    rng = np.random.default_rng(seed)
    for row in rows:
        prompt, output = table.draw(rng)
        yield replace(row, prompt_tokens=row.prompt_tokens or prompt, output_tokens=row.output_tokens or output)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidValue(name, value, "must be positive")
