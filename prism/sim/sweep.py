"""Many runs in parallel processes: every combination of policies, GPU counts, rates and SLO scales."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product

from prism.sim.inputs import Inputs, default_processes
from prism.sim.run import SimResult, simulate

RUNS_PER_PROCESS = 8
"""A new process gives back what a run's objects have left behind."""


@dataclass(frozen=True)
class Axes:
    """What varies; an empty axis keeps the value of the inputs."""

    policies: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    slo_scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Point:
    """One run's settings and outcome."""

    policy: str
    gpus: int
    rate: float
    slo_scale: float
    requests: int
    ttft: float
    """Attainment of TTFT objectives (0..1)."""
    tpot: float
    both: float
    """Goodput: the share that met TTFT and TPOT."""
    never_ended: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    errors: int
    activations: int
    output_tokens_per_s: float
    wall_s: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def variants(inputs: Inputs, axes: Axes) -> Iterator[Inputs]:
    """The inputs of every combination, in the order of the axes."""
    policies: Sequence[str | None] = axes.policies or (inputs.policy,)
    gpus: Sequence[int | None] = axes.gpus or (inputs.gpus,)
    for policy, count, rate, scale in product(
        policies, gpus, axes.rates or (inputs.rate,), axes.slo_scales or (inputs.slo_scale,)
    ):
        yield replace(inputs, policy=policy, gpus=count, rate=rate, slo_scale=scale)


def sweep_points(
    inputs: Inputs, axes: Axes, processes: int = 0, on_done: Callable[[int, int], None] = lambda done, all: None
) -> list[Point]:
    """Run every combination; the points come in the order of :func:`variants` whatever the number of processes.
    ``on_done`` is called with the number of finished runs and of all. Mistakes in options and files are raised before
    a process starts."""
    every = list(variants(inputs, axes))
    for one in every:
        one.check()
    every[0].spec()
    count = min(len(every), processes or default_processes())
    if count < 2:
        return [_counted(run_point(one), index, len(every), on_done) for index, one in enumerate(every)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, max_tasks_per_child=RUNS_PER_PROCESS) as pool:
        return [_counted(found, index, len(every), on_done) for index, found in enumerate(pool.map(run_point, every))]


def _counted(found: Point, index: int, all: int, on_done: Callable[[int, int], None]) -> Point:
    on_done(index + 1, all)
    return found


def run_point(inputs: Inputs) -> Point:
    """One run."""
    spec = inputs.spec()
    return point(simulate(spec), inputs, spec.policy.cluster.policy.value)


def point(result: SimResult, inputs: Inputs, policy: str) -> Point:
    """The numbers of a finished run that a sweep shows."""
    group = result.report.all
    return Point(
        policy=policy,
        gpus=len(result.world.devices),
        rate=inputs.rate,
        slo_scale=inputs.slo_scale,
        requests=group.attainment.requests,
        ttft=group.attainment.ttft,
        tpot=group.attainment.tpot,
        both=group.attainment.both,
        never_ended=result.stats.never_ended,
        ttft_p50_s=group.ttft_s.at(50.0) if group.ttft_s else None,
        ttft_p99_s=group.ttft_s.at(99.0) if group.ttft_s else None,
        tpot_p50_s=group.tpot_s.at(50.0) if group.tpot_s else None,
        errors=sum(group.errors.values()),
        activations=result.stats.activations,
        output_tokens_per_s=result.report.output_tokens_per_s,
        wall_s=result.stats.wall_s,
    )
