"""Set-ups drawn at random, so that none of them was chosen by anybody: a catalog, a fleet that its weights fill to two
fifths or five times, who is asked when and for how much, and what is promised."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.sim.pieces import Pieces
from benchmarks.sim.workloads import LARGE_8, MIX_58, SMALL_18, Mix, catalog, h100_cluster
from prism.core.specs import ModelSpec
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.trace.row import TraceRow

SECONDS: Final = 120.0
_FEWEST, _MOST = 50, 30_000
"""Requests. Of fewer a share says nothing, and more take long."""
_MIXES: Final[dict[str, Mix]] = {
    "1B to 70B": MIX_58,
    "1B to 8B": SMALL_18,
    "7B and 8B": LARGE_8,
    "8B": (("meta-llama/Llama-3.1-8B-Instruct", 16, 1),),
    "8B to 70B": (
        ("meta-llama/Llama-3.1-8B-Instruct", 4, 1),
        ("Qwen/Qwen2.5-14B-Instruct", 6, 1),
        ("Qwen/Qwen2.5-32B-Instruct", 4, 2),
        ("meta-llama/Llama-3.3-70B-Instruct", 3, 4),
    ),
}
_COPIES: Final = (0.5, 1.0, 1.0, 2.0)
"""How many times each model of a mix is there."""
_FULL: Final = (0.4, 0.7, 0.9, 1.3, 2.5, 5.0)
"""All weights over all memory."""
_MOST_GPUS: Final = 48
_GPU_BYTES: Final = 80e9

_LogNormal = tuple[float, float]
_LENGTHS: Final[dict[str, tuple[_LogNormal, _LogNormal]]] = {
    "chat": ((5.0, 1.0), (5.2, 0.8)),
    "documents": ((8.2, 0.6), (4.6, 0.6)),
    "writing": ((5.0, 0.8), (6.3, 0.5)),
    "classes": ((6.5, 0.6), (1.0, 0.5)),
}
"""Logarithms' mean and standard deviation, of tokens in a prompt and in an answer."""
_PER_GPU: Final = {"chat": 4.0, "documents": 1.5, "writing": 2.0, "classes": 8.0, "all kinds": 3.0}
"""Requests per second; a draw asks for a fifth to twice of it."""
_OBJECTIVES: Final = ("5 x P95 alone", "2 s, 50 ms", "10 s, 100 ms", "every other one 15 s, 200 ms")


@dataclass(frozen=True)
class Scenario:
    """One draw. The first five say in words what it is."""

    mix: str
    pattern: str
    lengths: str
    objectives: str
    full: float
    gpus: int
    models: tuple[ModelSpec, ...]
    rows: list[TraceRow]

    def __str__(self) -> str:
        return (
            f"{len(self.models)} of {self.mix}, {self.full:.2f} of {self.gpus} GPUs, {self.pattern}, {self.lengths}, "
            f"{self.objectives}, {len(self.rows)} requests"
        )


def scenario(draw: int, pieces: Pieces) -> Scenario:
    """``pieces`` keeps what each model takes alone. The first of the draw's set-ups that has neither too few requests
    nor too many."""
    rng = random.Random(f"scenario {draw}")
    while not _FEWEST <= len((found := _drawn(rng)).rows) <= _MOST:
        pass
    return replace(found, models=_promised(found, f"objectives scenario {draw}", pieces))


def _drawn(rng: random.Random) -> Scenario:
    mix, copies = rng.choice(list(_MIXES)), rng.choice(_COPIES)
    models = catalog(tuple((path, max(1, round(count * copies)), tp) for path, count, tp in _MIXES[mix]))
    weight_bytes = sum(m.weight_bytes for m in models)
    fewest = max(2, *(m.tp for m in models))
    gpus = max(fewest, min(_MOST_GPUS, round(weight_bytes / _GPU_BYTES / rng.choice(_FULL))))
    pattern, lengths = rng.choice(list(_PATTERNS)), rng.choice(list(_PER_GPU))
    per_s = gpus * _PER_GPU[lengths] * math.exp(rng.uniform(math.log(0.2), math.log(2.0)))
    rows = [
        TraceRow(at_s, str(model.name), *_tokens(lengths, rng))
        for at_s, model in sorted(_arrivals(pattern, models, per_s, rng), key=lambda one: one[0])
    ]
    full = weight_bytes / _GPU_BYTES / gpus
    return Scenario(mix, pattern, lengths, rng.choice(_OBJECTIVES), full, gpus, models, rows)


def _promised(found: Scenario, name: str, pieces: Pieces) -> tuple[ModelSpec, ...]:
    """The models with their objectives."""
    if found.objectives == _OBJECTIVES[1]:
        return tuple(replace(m, slo_ttft_s=2.0, slo_tpot_s=0.05) for m in found.models)
    if found.objectives == _OBJECTIVES[2]:
        return tuple(replace(m, slo_ttft_s=10.0, slo_tpot_s=0.1) for m in found.models)
    kept = pieces.kept(name, lambda: dict(dedicated_objectives(found.models, found.rows, h100_cluster(8))))
    models = with_objectives(found.models, {key: (value[0], value[1]) for key, value in kept.items()}, 5.0, 2.0)
    if found.objectives == _OBJECTIVES[0]:
        return models
    return tuple(replace(m, slo_ttft_s=15.0, slo_tpot_s=0.2) if i % 2 else m for i, m in enumerate(models))


def _tokens(lengths: str, rng: random.Random) -> tuple[int, int]:
    prompt, answer = _LENGTHS[lengths if lengths in _LENGTHS else rng.choice(list(_LENGTHS))]
    return (
        min(30_000, max(4, int(rng.lognormvariate(*prompt)))),
        min(3_000, max(1, int(rng.lognormvariate(*answer)))),
    )


# --- who is asked when ---


def _arrivals(
    pattern: str, models: tuple[ModelSpec, ...], per_s: float, rng: random.Random
) -> Iterator[tuple[float, ModelSpec]]:
    """Popularity falls with rank by a power that is drawn; who has which rank is drawn, too."""
    ranked, power = rng.sample(models, len(models)), rng.choice((0.0, 0.6, 1.0, 1.2))
    weights = [1.0 / rank**power for rank in range(1, len(ranked) + 1)]
    rates = [per_s * weight / sum(weights) for weight in weights]
    of_model = _PATTERNS[pattern](rates, rng)
    for rank, model in enumerate(ranked):
        yield from ((at_s, model) for at_s in of_model(rank) if 0.0 <= at_s < SECONDS)


_Times = Callable[[int], Iterator[float]]
"""Of the model with a rank."""


def _poisson(per_s: float, begin_s: float, end_s: float, rng: random.Random) -> Iterator[float]:
    at_s = begin_s
    while per_s > 0.0 and (at_s := at_s + rng.expovariate(per_s)) < end_s:
        yield at_s


def _steady(rates: list[float], rng: random.Random) -> _Times:
    return lambda rank: _poisson(rates[rank], 0.0, SECONDS, rng)


def _in_bursts(rates: list[float], rng: random.Random) -> _Times:
    """Each model for itself, a half, a fifth or a tenth of the time."""

    def times(rank: int) -> Iterator[float]:
        on_s, rests = rng.choice((5.0, 10.0, 20.0)), rng.choice((1.0, 4.0, 9.0))
        at_s = -rng.uniform(0.0, on_s * (1.0 + rests))
        while at_s < SECONDS:
            begins_s = at_s + rng.expovariate(1.0 / (on_s * rests))
            at_s = begins_s + rng.expovariate(1.0 / on_s)
            yield from _poisson(rates[rank] * (1.0 + rests), begins_s, at_s, rng)

    return times


def _together(rates: list[float], rng: random.Random) -> _Times:
    """Two to five groups of models, each with four fifths of its requests in its quarters of a minute."""
    groups, round_s = rng.randint(2, 5), SECONDS / 4

    def times(rank: int) -> Iterator[float]:
        yield from _poisson(0.2 * rates[rank], 0.0, SECONDS, rng)
        for turn in range(4):
            begins_s = (turn + rank % groups / groups) * round_s
            yield from _poisson(0.8 * rates[rank] * groups, begins_s, begins_s + round_s / groups, rng)

    return times


def _one_bursts(rates: list[float], rng: random.Random) -> _Times:
    """Steady but for one model, whose burst is half of all requests, all or twice as many."""
    who, begins_s = rng.randrange(len(rates)), rng.uniform(0.3, 0.6) * SECONDS
    per_s, lasts_s = sum(rates) * rng.choice((0.5, 1.0, 2.0)), rng.choice((5.0, 15.0, 30.0))

    def times(rank: int) -> Iterator[float]:
        yield from _poisson(rates[rank], 0.0, SECONDS, rng)
        if rank == who:
            yield from _poisson(per_s, begins_s, begins_s + lasts_s, rng)

    return times


def _turning(rates: list[float], rng: random.Random) -> _Times:
    """At half of the time the least popular model becomes the most popular one, and so on."""

    def times(rank: int) -> Iterator[float]:
        yield from _poisson(rates[rank], 0.0, SECONDS / 2, rng)
        yield from _poisson(rates[-1 - rank], SECONDS / 2, SECONDS, rng)

    return times


def _by_the_clock(rates: list[float], rng: random.Random) -> _Times:
    """Batches at equal intervals."""

    def times(rank: int) -> Iterator[float]:
        period_s = rng.choice((10.0, 20.0, 30.0, 60.0))
        batch, at_s = min(400, max(1, round(rates[rank] * period_s))), rng.uniform(0.0, period_s)
        while at_s < SECONDS:
            yield from (at_s + rng.uniform(0.0, 0.5) for _ in range(batch))
            at_s += period_s

    return times


def _in_waves(rates: list[float], rng: random.Random) -> _Times:
    """Rates rise and fall between nothing and twice the mean, each with a phase of its own."""

    def times(rank: int) -> Iterator[float]:
        phase, period_s = rng.uniform(0.0, 2 * math.pi), rng.choice((40.0, 60.0, 120.0))
        for at_s in _poisson(2.0 * rates[rank], 0.0, SECONDS, rng):
            if rng.random() < 0.5 + 0.5 * math.sin(2 * math.pi * at_s / period_s + phase):
                yield at_s

    return times


_PATTERNS: Final[dict[str, Callable[[list[float], random.Random], _Times]]] = {
    "steady": _steady,
    "in bursts": _in_bursts,
    "together": _together,
    "one bursts": _one_bursts,
    "turning": _turning,
    "by the clock": _by_the_clock,
    "in waves": _in_waves,
}
