"""How many requests could meet their objectives if memory and loading cost nothing? A row beside those of policies.

The GPUs are one pool of compute and bandwidth that can be divided at will. Every model runs wherever it likes: its
weights take no room, need not be loaded, and are read once per step whatever the place. An answer comes at a steady
pace, a part of its objective; all answers of a model share its steps. So a model that answers takes as much of the pool
as such steps read and compute per second, a prompt its computation spread over its objective, and a request that finds
no room for that misses, as do all of those models that take the most of the pool per request, where leaving them out
serves more of the others (which the best of several runs knows before). What a device is, is the modelled GPU of all
other rows (:mod:`prism.sim.roofline`, :mod:`prism.sim.sharing`).

Requests are taken in order of arrival, and answers keep one pace: it is an estimate of what the GPUs could do, above
everything that was simulated, and no proof that nothing does more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import Cluster
from prism.sim.gpus import GpuKind, gpu, with_rates
from prism.sim.roofline import StepCost, step_cost
from prism.trace.row import TraceRow

IDEAL: Final = "ideal"
"""Its name among those of policies."""
PACES: Final = (0.6, 0.75, 0.9, 1.0)
"""Parts of the objective of a token's time; the best one is taken."""
LEFT_OUT: Final = 12
"""Most models that are left out."""
_MOST_ENGINES: Final = 1024


@dataclass(frozen=True, slots=True)
class Take:
    """What somebody takes of the pool, in devices: their compute, their bandwidth, and the larger of both."""

    compute: float = 0.0
    memory: float = 0.0
    larger: float = 0.0

    def plus(self, other: Take, sign: float = 1.0) -> Take:
        return Take(
            self.compute + sign * other.compute, self.memory + sign * other.memory, self.larger + sign * other.larger
        )

    def fits(self, gpus: int, kind: GpuKind) -> bool:
        """As :class:`prism.sim.sharing.Pool` has it for one device."""
        return max(self.compute, self.memory, self.larger / kind.overlap_gain) <= gpus


def decoding(cost: StepCost, tp: int, token_s: float, answers: int, context: int) -> Take | None:
    """What steps every ``token_s`` take for so many answers that hold ``context`` tokens, by as few engines as are fast
    enough; None: none are."""
    if not answers:
        return Take()
    engines = 1
    while engines <= min(answers, _MOST_ENGINES):
        run, load = cost.decode(-(-answers // engines), context // engines)
        if run.first_s <= token_s:
            part = engines * tp * run.first_s / token_s
            return Take(part * load.compute, part * load.memory, part * max(load.compute, load.memory))
        engines += max(1, engines // 4)
    return None


class _Model:
    """One model's answers, and what they take."""

    def __init__(self, spec: ModelSpec, kind: GpuKind, pace: float) -> None:
        self.spec, self._cost = spec, step_cost(spec, kind)
        alone, _ = self._cost.decode(1, 0)
        self.token_s = min(spec.slo_tpot_s, max(pace * spec.slo_tpot_s, 1.01 * alone.first_s))
        self.answers, self.context, self.take = 0, 0, Take()
        self.asked, self.since_s, self.device_s = 0, 0.0, 0.0

    def taking(self, answers: int, context: int) -> Take | None:
        """With so many more (or fewer) answers and tokens of theirs."""
        return decoding(self._cost, self.spec.tp, self.token_s, self.answers + answers, self.context + context)

    def change(self, answers: int, context: int, take: Take, now_s: float) -> None:
        self.device_s += self.take.larger * (now_s - self.since_s)
        self.since_s, self.take = now_s, take
        self.answers, self.context = self.answers + answers, self.context + context

    def prompt(self, tokens: int) -> Take:
        """Until its first token is due."""
        seconds, load = self._cost.prefill(tokens, tokens * tokens / 2, 0, 1)
        part = self.spec.tp * seconds * load.compute / self.spec.slo_ttft_s
        return Take(part, 0.0, part)


def ideal(cluster: Cluster, models: Sequence[ModelSpec], rows: Sequence[TraceRow]) -> float:
    """The share of ``rows`` that meet their objectives; see the module. All devices are alike."""
    kind = with_rates(gpu(cluster.groups[0].gpu), cluster.groups[0].rates)
    best = 0
    for pace in PACES:
        served, dear = _run(models, rows, kind, pace, None, frozenset())
        for left_out in range(min(LEFT_OUT, len(dear)) + 1):
            found, _ = _run(models, rows, kind, pace, cluster.gpus, frozenset(dear[:left_out]))
            best = max(best, found)
            if found == served:
                break
    return best / len(rows)


def _run(
    models: Sequence[ModelSpec],
    rows: Sequence[TraceRow],
    kind: GpuKind,
    pace: float,
    gpus: int | None,
    left_out: frozenset[str],
) -> tuple[int, list[str]]:
    """How many requests are served, and the models by what they took of the pool per request, most first. ``gpus``:
    None for as many as they like."""
    made = {str(m.name): _Model(m, kind, pace) for m in models}
    pool, served, ends = Take(), 0, _Ends()
    for row in rows:
        for end in ends.until(row.arrival_s):
            pool = end.leave(pool)
        model = made[row.model]
        model.asked += 1
        prompt, tokens = row.prompt_tokens or 1, row.output_tokens or 1
        context = prompt + tokens // 2
        take, first = model.taking(1, context), model.prompt(prompt)
        if row.model in left_out or take is None:
            continue
        then = pool.plus(take).plus(model.take, -1.0).plus(first)
        if gpus is not None and not then.fits(gpus, kind):
            continue
        pool, served = then, served + 1
        model.change(1, context, take, row.arrival_s)
        ends.add(row.arrival_s + model.spec.slo_ttft_s, model, first, None)
        ends.add(row.arrival_s + tokens * model.token_s, model, None, context)
    for end in ends.until(float("inf")):
        pool = end.leave(pool)
    dear = [name for name, m in made.items() if m.asked]
    return served, sorted(dear, key=lambda name: -made[name].device_s / made[name].asked)


@dataclass(frozen=True, slots=True)
class _End:
    """Of a prompt's computation, or of an answer."""

    at_s: float
    model: _Model
    prompt: Take | None
    context: int | None

    def leave(self, pool: Take) -> Take:
        """The pool without it."""
        if self.prompt is not None:
            return pool.plus(self.prompt, -1.0)
        assert self.context is not None
        model, before = self.model, self.model.take
        take = model.taking(-1, -self.context)
        assert take is not None  # fewer answers take less
        model.change(-1, -self.context, take, self.at_s)
        return pool.plus(take).plus(before, -1.0)


class _Ends:
    """In order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _End]] = []
        self._count = 0

    def add(self, at_s: float, model: _Model, prompt: Take | None, context: int | None) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, _End(at_s, model, prompt, context)))

    def until(self, now_s: float) -> Iterable[_End]:
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[2]
