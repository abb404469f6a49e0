"""What a trace is like: the four characteristics of the Prism paper (section 3.1, Figure 2), in one pass.

- **popularity**: each model's share; what the top 10%, 40% and the last 60% of the models have;
- **idle intervals**: times longer than 10 s without arrivals of a model, from the start of the trace to its end: their
  median length, how many per hour;
- **variability**: the coefficient of variation of a model's requests per minute;
- **rate change**: the largest ratio of the rates of two 10 s bins less than a minute apart (an empty bin counts as one
  request, so that only real bursts count).

Memory: one counter per model and bin of 10 s, and the idle gaps; it grows with models x hours, not with requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from prism.trace.row import TraceRow

IDLE_S: Final = 10.0
BIN_S: Final = 10.0
BINS_PER_MINUTE: Final = 6
CHANGE: Final = 5.0
LONG_S: Final = 10_000.0
SLOW_RPS: Final = 0.1
"""A longer and slower trace of whole numbers was probably recorded in milliseconds (10 s and 100/s)."""


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of something."""

    p10: float
    p50: float
    p90: float
    p99: float


class ModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """One model. None where there are too few requests to say."""

    model: str
    requests: int
    share: float
    rate_rps: float
    idle_median_s: float | None
    idle_per_hour: float
    idle_share: float
    """Share of the trace's time that lies in idle intervals."""
    cv_per_minute: float | None
    gap_cv: float | None
    rate_change: float
    """Largest ratio of rates within a minute."""


class TraceStats(msgspec.Struct, frozen=True, kw_only=True):
    """One trace."""

    requests: int
    span_s: float
    rate_rps: float
    top_10_share: float
    top_40_share: float
    last_60_share: float
    idle_median_s: Spread | None
    """Over models: the medians of their idle intervals."""
    idle_per_hour: Spread
    cv_per_minute: Spread | None
    rate_change: Spread
    changes_5x_share: float
    """Share of the models whose rate changes at least 5-fold within some minute."""
    prompt_tokens: Spread | None
    output_tokens: Spread | None
    models: list[ModelStats]
    """Most popular first."""
    in_milliseconds: bool = False
    """Whether the arrival times look like milliseconds: whole numbers, hours long, hardly any traffic."""


class _Model:
    """What is counted of one model while rows pass."""

    __slots__ = ("bins", "gap_sum", "gap_sum2", "idle", "last_s", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.last_s: float | None = None
        self.gap_sum = self.gap_sum2 = 0.0
        self.idle: list[float] = []
        self.bins: Counter[int] = Counter()

    def add(self, at_s: float) -> None:
        self.requests += 1
        self.bins[int(at_s // BIN_S)] += 1
        if self.last_s is not None:
            gap_s = at_s - self.last_s
            self.gap_sum += gap_s
            self.gap_sum2 += gap_s * gap_s
        self.idle_until(at_s)
        self.last_s = at_s

    def idle_until(self, at_s: float) -> None:
        """The time since the last arrival (or the start of the trace) is an idle interval if it is long enough."""
        if (gap_s := at_s - (self.last_s or 0.0)) > IDLE_S:
            self.idle.append(gap_s)


def trace_stats(rows: Iterable[TraceRow]) -> TraceStats:
    """The characteristics of ``rows``, taken in one pass."""
    models: dict[str, _Model] = {}
    prompts: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    end_s, whole = 0.0, True
    for row in rows:
        models.setdefault(row.model, _Model()).add(row.arrival_s)
        end_s = row.arrival_s
        whole = whole and end_s.is_integer()
        if row.prompt_tokens is not None:
            prompts[row.prompt_tokens] += 1
        if row.output_tokens is not None:
            outputs[row.output_tokens] += 1
    for model in models.values():
        model.idle_until(end_s)
    total = sum(m.requests for m in models.values())
    found = [_model_stats(name, model, total, end_s) for name, model in models.items()]
    stats = _trace_stats(sorted(found, key=lambda m: (-m.requests, m.model)), total, end_s, prompts, outputs)
    slow = end_s >= LONG_S and stats.rate_rps < SLOW_RPS
    return msgspec.structs.replace(stats, in_milliseconds=whole and slow)


def _trace_stats(
    models: list[ModelStats], total: int, span_s: float, prompts: Counter[int], outputs: Counter[int]
) -> TraceStats:
    shares = np.array([m.share for m in models])
    return TraceStats(
        requests=total,
        span_s=span_s,
        rate_rps=total / span_s if span_s else 0.0,
        top_10_share=_top(shares, 0.1),
        top_40_share=_top(shares, 0.4),
        last_60_share=1 - _top(shares, 0.4) if models else 0.0,
        idle_median_s=_spread([m.idle_median_s for m in models]),
        idle_per_hour=_spread([m.idle_per_hour for m in models]) or Spread(0, 0, 0, 0),
        cv_per_minute=_spread([m.cv_per_minute for m in models]),
        rate_change=_spread([m.rate_change for m in models]) or Spread(1, 1, 1, 1),
        changes_5x_share=float(np.mean([m.rate_change >= CHANGE for m in models])) if models else 0.0,
        prompt_tokens=_weighted_spread(prompts),
        output_tokens=_weighted_spread(outputs),
        models=models,
    )


def _model_stats(name: str, model: _Model, total: int, span_s: float) -> ModelStats:
    counts = _bin_counts(model.bins, span_s)
    gaps = model.requests - 1
    mean = model.gap_sum / gaps if gaps > 0 else 0.0
    deviation = max(0.0, model.gap_sum2 / gaps - mean * mean) ** 0.5 if gaps > 0 else 0.0
    return ModelStats(
        model=name,
        requests=model.requests,
        share=model.requests / total,
        rate_rps=model.requests / span_s if span_s else 0.0,
        idle_median_s=float(np.median(model.idle)) if model.idle else None,
        idle_per_hour=len(model.idle) / span_s * 3600 if span_s else 0.0,
        idle_share=sum(model.idle) / span_s if span_s else 0.0,
        cv_per_minute=_cv_per_minute(counts),
        gap_cv=deviation / mean if gaps > 1 and mean > 0 else None,
        rate_change=_rate_change(counts),
    )


def _bin_counts(bins: Counter[int], span_s: float) -> NDArray[np.int64]:
    counts = np.zeros(int(span_s // BIN_S) + 1, dtype=np.int64)
    for index, count in bins.items():
        counts[index] = count
    return counts


def _cv_per_minute(counts: NDArray[np.int64]) -> float | None:
    """Over the whole minutes of the trace; None when there are fewer than two."""
    minutes = (len(counts) - 1) // BINS_PER_MINUTE or 0
    if minutes < 2:
        return None
    per_minute = counts[: minutes * BINS_PER_MINUTE].reshape(minutes, BINS_PER_MINUTE).sum(axis=1)
    mean = float(per_minute.mean())
    return float(per_minute.std()) / mean if mean else None


def _rate_change(counts: NDArray[np.int64]) -> float:
    best, whole = 1.0, counts[:-1]
    for apart in range(1, min(BINS_PER_MINUTE, len(whole))):
        a, b = whole[:-apart], whole[apart:]
        ratios = np.maximum(a, b) / np.maximum(np.minimum(a, b), 1)
        best = max(best, float(ratios.max()))
    return best


def _top(shares: NDArray[np.float64], part: float) -> float:
    """What the most popular ``part`` of the models has (at least one model)."""
    return float(shares[: max(1, round(len(shares) * part))].sum()) if len(shares) else 0.0


def _spread(values: Iterable[float | None]) -> Spread | None:
    numbers = [v for v in values if v is not None]
    return Spread(*(float(v) for v in np.percentile(numbers, (10, 50, 90, 99)))) if numbers else None


def _weighted_spread(counts: Counter[int]) -> Spread | None:
    if not counts:
        return None
    values = np.array(sorted(counts))
    ranks = np.cumsum([counts[int(v)] for v in values])
    at = np.searchsorted(ranks, np.array((0.10, 0.50, 0.90, 0.99)) * (ranks[-1] - 1), side="right")
    return Spread(*(float(v) for v in values[np.minimum(at, len(values) - 1)]))
