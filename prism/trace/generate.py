"""A generator of multi-model traces fitted to published facts.

What the Prism paper (section 3.1) and the public traces show, and the part of the model that makes it:

- long-tailed popularity: Zipf, or log-normal rates;
- groups of models that are active together and long idle intervals: an on/off process per group, exponential periods, a
  log-normal intensity per on-period (rates change several-fold within a minute);
- bursts inside on-periods: per model a Gamma renewal process whose gap CV is drawn per model from a log-normal.

The renewal process runs in operational time and is mapped through the integral of the group's intensity, so that
mean rates come out as asked whatever the on/off pattern is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from prism.core.errors import InvalidValue
from prism.trace.lengths import length_table
from prism.trace.row import TraceRow


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """What to generate. Every number is a mean unless it says otherwise."""

    models: int = 8
    duration_s: float = 600.0
    rate_rps: float = 2.8
    """All models together."""
    zipf: float | None = None
    """Popularity by rank**-zipf; None: log-normal with ``sigma``."""
    sigma: float = 0.93
    groups: int = 4
    on_s: float = 60.0
    off_s: float = 60.0
    off_level: float = 0.05
    """Intensity of an off-period relative to the mean of on-periods."""
    level_sigma: float = 0.5
    """Spread (of the logarithm) of the intensity between on-periods."""
    cv_median: float = 1.15
    """Gap CV inside an on-period: median over models."""
    cv_p90: float = 2.5
    lengths: str = "arena"
    names: tuple[str, ...] = ()
    """Names in order of popularity; empty: ``model-0`` and so on."""

    def __post_init__(self) -> None:
        for name in ("models", "duration_s", "rate_rps", "groups", "on_s", "cv_median", "cv_p90"):
            if not getattr(self, name) > 0:
                raise InvalidValue(name, getattr(self, name), "must be positive")
        for name in ("off_s", "off_level", "level_sigma", "sigma"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidValue(name, getattr(self, name), "must not be negative")
        if len(set(self.names)) != len(self.names):
            raise InvalidValue("names", self.names, "must differ from each other")
        if self.names and len(self.names) != self.models:
            raise InvalidValue("names", len(self.names), f"must be as many as models ({self.models})")
        length_table(self.lengths)

    def model_names(self) -> tuple[str, ...]:
        width = len(str(self.models - 1))
        return self.names or tuple(f"model-{i:0{width}}" for i in range(self.models))


LEAST_LEVEL: Final = 0.1
"""A group that happened to be idle nearly all the time is not made busier than this allows: at most ten times as busy
while it is active as in a long trace. Beyond that its models get fewer requests than asked."""

PRESETS: Final = {
    # Seven or eight models of one provider, ten minutes: one dominates, most are never idle for long
    "hyperbolic": GeneratorSpec(
        models=8, zipf=2.0, groups=3, on_s=105, off_s=80, off_level=0.0, level_sigma=0.35, cv_median=0.4, cv_p90=0.7
    ),
    # Chatbot Arena folded onto eight models
    "arena": GeneratorSpec(
        models=8,
        rate_rps=1.26,
        sigma=1.3,
        groups=4,
        on_s=56,
        off_s=100,
        off_level=0.0,
        level_sigma=0.6,
        cv_median=0.9,
        cv_p90=2.0,
    ),
    # 24 models of a provider, the paper's popularity (the least popular 60% make a quarter of the requests)
    "novita": GeneratorSpec(
        models=24, duration_s=3600, rate_rps=6.0, zipf=0.92, groups=8, on_s=90, off_s=60, lengths="sharegpt"
    ),
    # Many clients of very different size
    "servegen": GeneratorSpec(
        models=64, duration_s=7200, rate_rps=42.0, sigma=1.9, groups=16, on_s=300, off_s=200, lengths="servegen"
    ),
}


def preset(name: str) -> GeneratorSpec:
    """The spec called ``name``. Raises :class:`InvalidValue` naming those there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise InvalidValue("preset", name, "unknown generator preset", list(PRESETS)) from None


def shortened(spec: GeneratorSpec, given: Mapping[str, object]) -> GeneratorSpec:
    """``spec`` with its on- and off-periods shortened as its duration is by ``given`` (options that override it),
    unless they are given too: otherwise groups would be idle in all of a short trace."""
    duration_s = given.get("duration_s", spec.duration_s)
    if not isinstance(duration_s, float) or not 0 < duration_s < spec.duration_s or {"on_s", "off_s"} & set(given):
        return spec
    factor = duration_s / spec.duration_s
    return replace(spec, on_s=spec.on_s * factor, off_s=spec.off_s * factor)


def generate(spec: GeneratorSpec, seed: int) -> Iterator[TraceRow]:
    """The rows in order of arrival, fixed by ``spec`` and ``seed``. Memory does not grow with the trace."""
    shares = _shares(spec, np.random.default_rng([seed, 0]))
    rates = [spec.rate_rps * float(share) for share in shares]
    levels = [_mean_level(spec, seed, group) for group in range(spec.groups)]
    streams = [_model_arrivals(spec, seed, i, rate / levels[i % spec.groups]) for i, rate in enumerate(rates)]
    names, table = spec.model_names(), length_table(spec.lengths)
    rngs = [np.random.default_rng([seed, 3, index]) for index in range(spec.models)]
    for at_s, index in heapq.merge(*streams):
        prompt, output = table.draw(rngs[index])
        yield TraceRow(round(at_s, 6), names[index], prompt, output)


def _shares(spec: GeneratorSpec, rng: np.random.Generator) -> np.ndarray:
    """Each model's share of the requests, most popular first."""
    if spec.zipf is not None:
        weights = np.arange(1, spec.models + 1, dtype=np.float64) ** -spec.zipf
    else:
        weights = np.sort(rng.lognormal(0.0, spec.sigma, spec.models))[::-1]
    return np.asarray(weights / weights.sum())


def _model_arrivals(spec: GeneratorSpec, seed: int, index: int, rate_rps: float) -> Iterator[tuple[float, int]]:
    """Arrival times of one model, tagged with its index, up to the end of the trace."""
    rng = np.random.default_rng([seed, 2, index])
    shape = 1 / _gap_cv(spec, rng) ** 2
    due = float(rng.gamma(shape, 1 / shape) * rng.random())
    start_s, passed = 0.0, 0.0
    for length_s, level in _group_periods(spec, seed, index % spec.groups):
        rate = rate_rps * level
        while rate > 0 and due <= passed + rate * length_s:
            at_s = start_s + (due - passed) / rate
            if at_s >= spec.duration_s:
                return
            yield at_s, index
            due += float(rng.gamma(shape, 1 / shape))
        passed += rate * length_s
        start_s += length_s
        if start_s >= spec.duration_s:
            return


def _mean_level(spec: GeneratorSpec, seed: int, group: int) -> float:
    """The mean over the trace of the group's intensity as it was drawn: a short trace sees few periods, and dividing by
    it keeps the rates that were asked for."""
    passed_s, total = 0.0, 0.0
    for length_s, level in _group_periods(spec, seed, group):
        inside_s = min(length_s, spec.duration_s - passed_s)
        total += inside_s * level
        passed_s += length_s
        if passed_s >= spec.duration_s:
            break
    return max(total / spec.duration_s, LEAST_LEVEL)


def _group_periods(spec: GeneratorSpec, seed: int, group: int) -> Iterator[tuple[float, float]]:
    return _periods(spec, np.random.default_rng([seed, 1, group]))


def _gap_cv(spec: GeneratorSpec, rng: np.random.Generator) -> float:
    spread = math.log(spec.cv_p90 / spec.cv_median) / 1.2816  # the normal 90% point
    return float(np.clip(spec.cv_median * math.exp(spread * rng.standard_normal()), 0.2, 8.0))


def _periods(spec: GeneratorSpec, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
    """Endless ``(seconds, intensity)`` of one group; the intensity has mean 1 over time."""
    share_on = spec.on_s / (spec.on_s + spec.off_s)
    unit = 1 / (share_on + (1 - share_on) * spec.off_level)
    on = bool(rng.random() < share_on)
    while True:
        if on:
            level = unit * float(rng.lognormal(-(spec.level_sigma**2) / 2, spec.level_sigma))
            yield float(rng.exponential(spec.on_s)), level
        elif spec.off_s > 0:
            yield float(rng.exponential(spec.off_s)), unit * spec.off_level
        on = not on
