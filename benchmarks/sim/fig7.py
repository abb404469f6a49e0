"""Figure 7: how do attainments of Prism and its rivals change with request rate, objectives and number of GPUs?

Two traces (Hyperbolic-like and Arena-like, generated), four policies over the same modelled H100s. Rows: 8 models on
2 GPUs over request rates; the same over SLO scales; 18 models on 2 to 8 GPUs. Objectives: P95 of each model alone on a
GPU, times the scale (TTFT 5, TPOT 2 unless swept).

    python benchmarks/sim/fig7.py [--seconds 150]

About four minutes of one core. Traces much shorter than that end before growing queues make anybody late.

The last result and what to think of it is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import dataclass

from plots import crossing, panels, show
from workloads import SMALL_8, SMALL_18, Mix, Workload, arena, catalog, h100_cluster, hyperbolic, preload, requests

from prism.core.settings import PolicySettings
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimSpec, simulate
from prism.trace.report import Attainment

POLICIES = ("prism", "muxserve", "static", "qlm")
TTFT_SCALE, TPOT_SCALE = 5.0, 2.0
RATES = (16.0, 32.0, 48.0, 64.0, 96.0, 128.0, 160.0)
SCALES = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0)
GPUS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
BASE_RATE = 40.0
ROWS: dict[str, tuple[float, ...]] = {"requests/s": RATES, "SLO scale": SCALES, "GPUs": GPUS}
TRACES = {"Hyperbolic-like": hyperbolic, "Arena-like": arena}

Curve = dict[str, list[tuple[float, Attainment]]]


def attained(mix: Mix, work: Workload, gpus: int, ttft_scale: float, tpot_scale: float) -> dict[str, Attainment]:
    """One point: every policy on the same requests and objectives."""
    plain = catalog(mix)
    rows = requests(work.spec, plain)
    base = dedicated_objectives(plain, rows, h100_cluster(1))
    models = with_objectives(plain, base, ttft_scale, tpot_scale)
    result = {}
    for policy in POLICIES:
        settings = PolicySettings.named(policy)
        spec = SimSpec(h100_cluster(gpus), models, settings, lambda: rows, preload_share=preload(policy))
        result[policy] = simulate(spec).report.all.attainment
    return result


@dataclass(frozen=True)
class Point:
    """One x of one row of one trace."""

    trace: str
    row: str
    x: float
    seconds: float

    def run(self) -> dict[str, Attainment]:
        rate = self.x if self.row == "requests/s" else BASE_RATE
        work = TRACES[self.trace](rate, self.seconds)
        if self.row == "GPUs":
            return attained(SMALL_18, work, int(self.x), TTFT_SCALE, TPOT_SCALE)
        scales = (self.x, self.x) if self.row == "SLO scale" else (TTFT_SCALE, TPOT_SCALE)
        return attained(SMALL_8, work, 2, *scales)


def run_point(point: Point) -> dict[str, Attainment]:
    return point.run()


def both(curves: Curve) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[tuple[float, float]]]]:
    """TTFT and TPOT curves."""
    ttft = {p: [(x, a.ttft) for x, a in points] for p, points in curves.items()}
    return ttft, {p: [(x, a.tpot) for x, a in points] for p, points in curves.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    points = [Point(t, row, x, args.seconds) for row, xs in ROWS.items() for t in TRACES for x in xs]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        found = dict(zip(points, pool.map(run_point, points, chunksize=1), strict=True))
    grid = []
    for row, xs in ROWS.items():
        cells = []
        for trace in TRACES:
            curves: Curve = {p: [(x, found[Point(trace, row, x, args.seconds)][p]) for x in xs] for p in POLICIES}
            for metric, shares in zip(("TTFT", "TPOT"), both(curves), strict=True):
                cells.append((f"{trace}, {metric}", row, shares))
                ends = {p: show(crossing(pts, falling=row == "requests/s")) for p, pts in shares.items()}
                print(f"{trace} {metric} over {row}: 99% at {ends}")
                for policy, pts in shares.items():
                    print(f"    {policy:9s} " + " ".join(f"{x:g}:{share:.3f}" for x, share in pts))
        grid.append(cells)
    print(panels("fig7", grid, "Attainment over rate, objectives and GPUs (simulated H100s)"))


if __name__ == "__main__":
    main()
