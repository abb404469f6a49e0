"""The runs behind figure 7: lines of points, one line for each row, trace, draw of the trace and policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.sim.workloads import (
    SETUPS,
    SMALL_8,
    SMALL_18,
    arena,
    catalog,
    h100_cluster,
    hyperbolic,
    preload,
    requests,
    scaled,
)
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import Cluster
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimSpec, mean_rates, simulate
from prism.trace.report import Attainment
from prism.trace.row import TraceRow

POLICIES = ("prism", "muxserve", "static", "qlm")
FREE = "free memory"
"""The line of a system whose memory never binds: the better of ``prism`` and ``muxserve`` on devices of FREE_BYTES."""
FREE_BYTES = "2000GiB"
TOLD = "prism told"
"""The line of ``prism`` that places models by the trace's mean rates until it has seen a minute, as ``muxserve`` does
for good; run when it is asked for (``--policies``), and not drawn."""
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
BASE_RATE = 40.0
FOLLOWED = 0.88
"""A line is not followed to higher rates once a smaller share meets TTFT."""
XS: dict[str, tuple[float, ...]] = {
    "rate": (),  # a set-up's own
    "slo": (1.0, 2.0, 3.0, 5.0, 10.0, 20.0),
    "gpus": (2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
}
LABELS = {"rate": "requests/s", "slo": "SLO scale", "gpus": "GPUs"}
TRACES = {"hyperbolic": hyperbolic, "arena": arena}


@dataclass(frozen=True)
class Line:
    """One policy on one draw of one trace."""

    row: str
    setup: str
    """Of the ``rate`` row; empty for others."""
    trace: str
    draw: int
    policy: str


@dataclass(frozen=True)
class Found:
    """One point of a line."""

    x: float
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Task:
    """All lines of one draw."""

    row: str
    setup: str
    trace: str
    draw: int
    policies: tuple[str, ...]
    xs: tuple[float, ...]
    seconds: float

    def run(self) -> Iterator[tuple[Line, list[Found]]]:
        points = {"rate": self._rates, "slo": self._scales, "gpus": self._gpus}[self.row]
        for policy in self.policies:
            line = Line(self.row, self.setup, self.trace, self.draw, policy)
            yield line, [Found(x, a.ttft, a.tpot) for x, a in points(policy)]

    def _rates(self, policy: str) -> Iterator[tuple[float, Attainment]]:
        """One base trace at all rates; objectives are those of the base trace, whatever the rate."""
        setup = SETUPS[self.setup]
        rows, models = _base(self)
        for rate in self.xs:
            more = scaled(rows, rate / setup.base_rps, self.draw)
            free = setup.cluster(2, FREE_BYTES)
            found = (
                max((_run("prism", free, models, more), _run("muxserve", free, models, more)), key=lambda a: a.ttft)
                if policy == FREE
                else _run(policy, setup.cluster(2), models, more)
            )
            yield rate, found
            if found.ttft < FOLLOWED:
                return

    def _scales(self, policy: str) -> Iterator[tuple[float, Attainment]]:
        for scale in self.xs:
            yield scale, self._small(policy, SMALL_8, 2, scale, scale)

    def _gpus(self, policy: str) -> Iterator[tuple[float, Attainment]]:
        for gpus in self.xs:
            yield gpus, self._small(policy, SMALL_18, int(gpus), TTFT_SCALE, TPOT_SCALE)

    def _small(
        self, policy: str, mix: tuple[tuple[str, int, int], ...], gpus: int, ttft: float, tpot: float
    ) -> Attainment:
        plain = catalog(mix)
        rows = requests(TRACES[self.trace](BASE_RATE, self.seconds).spec, plain, self.draw)
        key = (mix, self.trace, self.draw, self.seconds)
        if key not in _OBJECTIVES:
            _OBJECTIVES[key] = dedicated_objectives(plain, rows, h100_cluster(1))
        models = with_objectives(plain, _OBJECTIVES[key], ttft, tpot)
        return _run(policy, h100_cluster(gpus), models, rows)


_OBJECTIVES: dict[object, dict[str, tuple[float, float]]] = {}
"""Base objectives that this process has found."""


def _base(task: Task) -> tuple[list[TraceRow], tuple[ModelSpec, ...]]:
    """The base trace of ``task`` and its models with their objectives."""
    setup = SETUPS[task.setup]
    rows = setup.base_rows(TRACES[task.trace](setup.base_rps, task.seconds), task.draw)
    key = replace(task, policies=(), xs=())
    if key not in _OBJECTIVES:
        _OBJECTIVES[key] = dedicated_objectives(setup.models(), rows, setup.cluster(1))
    return rows, with_objectives(setup.models(), _OBJECTIVES[key], TTFT_SCALE, TPOT_SCALE)


def _run(policy: str, cluster: Cluster, models: tuple[ModelSpec, ...], rows: list[TraceRow]) -> Attainment:
    settings = PolicySettings.named(policy.removesuffix(" told"))
    if policy == TOLD:
        expected = tuple(sorted(mean_rates(rows).items()))
        settings = replace(settings, cluster=replace(settings.cluster, expected_rates=expected))
    return simulate(
        SimSpec(cluster, models, settings, lambda: rows, preload_share=preload(settings.cluster.policy))
    ).report.all.attainment


def run_task(task: Task) -> list[tuple[Line, list[Found]]]:
    """All lines of ``task``."""
    return list(task.run())
