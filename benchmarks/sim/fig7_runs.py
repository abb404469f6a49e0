"""The runs behind figure 7: lines of points, one line for each row, trace, draw of the trace and policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from benchmarks.sim import variants
from benchmarks.sim.ideal import IDEAL, ideal
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.workloads import (
    SETUPS,
    SMALL_8,
    SMALL_18,
    Mix,
    arena,
    catalog,
    h100_cluster,
    hyperbolic,
    requests,
    scaled,
)
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import Cluster
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimResult
from prism.trace.row import TraceRow

FREE: Final = "free memory"
"""The line of a system whose memory never binds: the better of ``prism`` and ``muxserve`` on devices of FREE_BYTES."""
FREE_BYTES: Final = "2000GiB"
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
BASE_RATE = 40.0
FOLLOWED: Final = 0.88
"""A line is not followed to higher rates once a smaller share meets TTFT, or less than half of it both."""
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

    @property
    def name(self) -> str:
        return f"fig7 {self.row} {self.setup} {self.trace} {self.draw} {self.policy}"


@dataclass(frozen=True)
class Found:
    """One point of a line: shares that met TTFT, TPOT and both, and how many requests never ended."""

    x: float
    ttft: float
    tpot: float
    both: float
    never_ended: int = 0

    @staticmethod
    def ideal(x: float, cluster: Cluster, models: tuple[ModelSpec, ...], rows: list[TraceRow]) -> Found:
        share = round(ideal(cluster, models, rows), 5)
        return Found(x, share, share, share)

    @staticmethod
    def of(x: float, result: SimResult) -> Found:
        met = result.report.all.attainment
        return Found(x, round(met.ttft, 5), round(met.tpot, 5), round(met.both, 5), result.stats.never_ended)


@dataclass(frozen=True)
class Bench:
    """Makes lines; objectives of a draw are kept among the pieces, since all its lines have them."""

    pieces: Pieces
    xs: tuple[float, ...]
    """In place of a row's own."""
    seconds: float

    def run(self, line: Line) -> dict[str, Any]:
        """All points of ``line``, as the piece of it."""
        points = {"rate": self._rates, "slo": self._scales, "gpus": self._gpus}[line.row]
        return {**asdict(line), "points": [asdict(found) for found in points(line)]}

    def _rates(self, line: Line) -> Iterator[Found]:
        """One base trace at all rates; objectives are those of the base trace, whatever the rate."""
        setup = SETUPS[line.setup]
        rows = setup.base_rows(TRACES[line.trace](setup.base_rps, self.seconds), line.draw)
        models = self._with_objectives(line, setup.models(), rows, setup.cluster(1), TTFT_SCALE, TPOT_SCALE)
        for rate in self.xs or setup.rates:
            more = scaled(rows, rate / setup.base_rps, line.draw)
            found = _found(line.policy, rate, setup.cluster(2), setup.cluster(2, FREE_BYTES), models, more)
            yield found
            if found.ttft < FOLLOWED or found.both < FOLLOWED / 2:
                return

    def _scales(self, line: Line) -> Iterator[Found]:
        for scale in self.xs or XS["slo"]:
            yield self._small(line, scale, SMALL_8, 2, scale, scale)

    def _gpus(self, line: Line) -> Iterator[Found]:
        for gpus in self.xs or XS["gpus"]:
            yield self._small(line, gpus, SMALL_18, int(gpus), TTFT_SCALE, TPOT_SCALE)

    def _small(self, line: Line, x: float, mix: Mix, gpus: int, ttft: float, tpot: float) -> Found:
        plain = catalog(mix)
        rows = requests(TRACES[line.trace](BASE_RATE, self.seconds).spec, plain, line.draw)
        models = self._with_objectives(line, plain, rows, h100_cluster(1), ttft, tpot)
        return _found(line.policy, x, h100_cluster(gpus), h100_cluster(gpus), models, rows)

    def _with_objectives(
        self,
        line: Line,
        models: tuple[ModelSpec, ...],
        rows: list[TraceRow],
        alone: Cluster,
        ttft: float,
        tpot: float,
    ) -> tuple[ModelSpec, ...]:
        name = f"objectives {line.row} {line.setup} {line.trace} {line.draw} {self.seconds:g}"
        base = self.pieces.kept(name, lambda: dict(dedicated_objectives(models, rows, alone)))
        return with_objectives(models, {key: (value[0], value[1]) for key, value in base.items()}, ttft, tpot)


def _found(
    policy: str, x: float, cluster: Cluster, free: Cluster, models: tuple[ModelSpec, ...], rows: list[TraceRow]
) -> Found:
    if policy == IDEAL:
        return Found.ideal(x, cluster, models, rows)
    if policy != FREE:
        return Found.of(x, variants.run(policy, cluster, models, rows))
    found = [variants.run(who, free, models, rows) for who in (variants.PRISM, "muxserve")]
    return Found.of(x, max(found, key=lambda result: result.report.all.attainment.both))
