"""Figure 12: how many H100s do 58 models need under each policy?

58 models, 1B to 70B (``workloads.MIX_58``; the paper's own list is not in the copy at hand), 8 to 32 GPUs.
(a) TTFT attainment over the number of GPUs at TTFT scale 5, TPOT scale 2; (b) GPUs for 99% over TTFT scales.

    python -m benchmarks.sim.fig12 [--seconds 90] [--rate 60]

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.sim.plots import Panel, crossing, panels, show, single
from benchmarks.sim.workloads import MIX_58, catalog, h100_cluster, hyperbolic, preload, requests
from prism.core.settings import PolicySettings
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimSpec, simulate
from prism.trace.report import Attainment

POLICIES = ("prism", "muxserve", "static", "qlm")
GPUS = (8, 12, 16, 20, 24, 32)
SCALES = (5.0, 30.0)


@dataclass(frozen=True)
class Point:
    """One run."""

    scale: float
    policy: str
    gpus: int


class Bench:
    """The requests and base objectives that all runs share; made once per process."""

    def __init__(self, seconds: float, rate: float) -> None:
        self.plain = catalog(MIX_58)
        self.rows = requests(hyperbolic(rate, seconds).spec, self.plain)
        self.base = dedicated_objectives(self.plain, self.rows, h100_cluster(8))

    def run(self, point: Point) -> Attainment:
        models = with_objectives(self.plain, self.base, point.scale, 2.0)
        settings = PolicySettings.named(point.policy)
        cluster, share = h100_cluster(point.gpus), preload(point.policy)
        return simulate(
            SimSpec(cluster, models, settings, lambda: self.rows, preload_share=share)
        ).report.all.attainment


@lru_cache(maxsize=1)
def bench(seconds: float, rate: float) -> Bench:
    return Bench(seconds, rate)


def run_point(job: tuple[Point, float, float]) -> Attainment:
    point, seconds, rate = job
    return bench(seconds, rate).run(point)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    shared = bench(args.seconds, args.rate)
    ttft_ms = sorted(round(1e3 * b[0]) for b in shared.base.values())
    tpot_ms = sorted(round(1e3 * b[1], 1) for b in shared.base.values())
    print(f"{len(shared.rows)} requests; base TTFT {ttft_ms[0]}-{ttft_ms[-1]} ms (paper 40-130)")
    print(f"base TPOT {tpot_ms[0]}-{tpot_ms[-1]} ms (paper 5.2-50.9)", flush=True)
    points = [Point(scale, policy, gpus) for scale in SCALES for policy in POLICIES for gpus in GPUS]
    jobs = [(point, args.seconds, args.rate) for point in points]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        found = dict(zip(points, pool.map(run_point, jobs, chunksize=1), strict=True))
    cells = []
    for scale in SCALES:
        curves = {p: [(float(g), found[Point(scale, p, g)].ttft) for g in GPUS] for p in POLICIES}
        cells.append(Panel(f"TTFT, scale {scale:g}", "GPUs", {p: single(c) for p, c in curves.items()}))
        for policy, line in curves.items():
            text = " ".join(f"{int(x)}:{y:.3f}" for x, y in line)
            print(f"TTFT scale {scale:g} {policy:9s} {text}  99% from {show(crossing(line))} GPUs")
    tpot = {p: [(float(g), found[Point(SCALES[0], p, g)].tpot) for g in GPUS] for p in POLICIES}
    for policy, line in tpot.items():
        print(f"TPOT scale 2 {policy:9s} " + " ".join(f"{int(x)}:{y:.3f}" for x, y in line))
    cells.append(Panel("TPOT, scale 2", "GPUs", {p: single(c) for p, c in tpot.items()}))
    print(panels("fig12", [cells], "58 models (simulated H100s)"))


if __name__ == "__main__":
    main()
