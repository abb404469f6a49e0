"""Which runs a validation consists of: their names, lengths and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from prism.trace.generate import generate, preset
from prism.trace.row import TraceRow
from prism.trace.transform import scale_lengths

TRACES = ("hyperbolic", "arena")
RATES = (1.0, 2.0, 4.0)
LEAST_REQUESTS, LEAST_SECONDS = 140, 40.0
"""Of a run. The P99 of 140 lies between the second and the third slowest: one that was slow by accident does not decide
it."""
POLICIES = ("prism", "muxserve")
MOST_PROMPT, MOST_OUTPUT = 400, 64


@dataclass(frozen=True)
class Draw:
    """One trace: ``rate * seconds`` requests in ``seconds``, drawn by ``seed``."""

    trace: str
    """A preset of the generator."""
    rate: float
    seconds: float
    seed: int

    @property
    def name(self) -> str:
        """Says all of it, so that another draw never goes on with what this one left."""
        return f"{self.trace}-{self.rate:g}-{self.seconds:g}s-seed{self.seed}"

    def rows(self, models: tuple[str, ...]) -> list[TraceRow]:
        """The first requests of a longer draw, stretched to the run's length: how many come within so short a time is
        luck otherwise (the Arena-like preset gave 53 in 75 s at "1/s")."""
        spec = replace(
            preset(self.trace), models=len(models), names=models, rate_rps=self.rate, duration_s=4 * self.seconds
        )
        drawn = scale_lengths(generate(spec, self.seed), most_prompt=MOST_PROMPT, most_output=MOST_OUTPUT)
        rows = list(islice(drawn, round(self.rate * self.seconds)))
        stretch = self.seconds / rows[-1].arrival_s
        return [replace(row, arrival_s=round(row.arrival_s * stretch, 6)) for row in rows]


@dataclass(frozen=True)
class Run:
    """One trace under one policy, live and simulated."""

    draw: Draw
    policy: str

    @property
    def name(self) -> str:
        return f"{self.draw.name}-{self.policy}"

    @property
    def title(self) -> str:
        return f"{self.draw.trace} {self.draw.rate:g}/s {self.policy}"


def runs(
    traces: Sequence[str], rates: Sequence[float], policies: Sequence[str], seconds: float | None, seed: int
) -> list[Run]:
    """All combinations, each ``seconds`` long (None: as long as its requests take)."""
    draws = [
        Draw(trace, rate, seconds or max(LEAST_SECONDS, LEAST_REQUESTS / rate), seed)
        for trace in traces
        for rate in rates
    ]
    return [Run(draw, policy) for draw in draws for policy in policies]
