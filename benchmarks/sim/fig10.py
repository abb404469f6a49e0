"""Figure 10: what is the global scheduler (placement by KV pressure, migration) worth?

Eight models on two H100s. With the global scheduler against without it (each model goes to the next GPU in turn where
it fits and stays). Our own rules against the paper's are in ablation.py.

    python -m benchmarks.sim.fig10 [--seconds 180]

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import matplotlib.pyplot as plt

from benchmarks.sim.plots import save
from benchmarks.sim.workloads import SMALL_8, Mix, catalog, h100_cluster, hyperbolic, requests
from prism.core.settings import ClusterSettings, PolicySettings
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimResult, SimSpec, simulate

RATE = 64.0


def run(mix: Mix, gpus: int, rate: float, seconds: float, preload: float, **changes: object) -> SimResult:
    plain = catalog(mix)
    rows = requests(hyperbolic(rate, seconds).spec, plain)
    models = with_objectives(plain, dedicated_objectives(plain, rows, h100_cluster(1)), 5.0, 2.0)
    settings = PolicySettings.named("prism")
    cluster: ClusterSettings = replace(settings.cluster, **changes)  # type: ignore[arg-type]
    policy = replace(settings, cluster=cluster)
    return simulate(
        SimSpec(h100_cluster(gpus), models, policy, lambda: rows, sample_every_s=1.0, preload_share=preload)
    )


def imbalance(result: SimResult) -> float:
    """Mean over time of the fuller device's used memory over the emptier one's."""
    ratios = []
    for sample in result.report.timeline.samples:
        used = sorted(sample.mapped_bytes.values())
        if used and used[0]:
            ratios.append(used[-1] / used[0])
    return sum(ratios) / len(ratios)


def line(name: str, result: SimResult) -> str:
    group = result.report.all
    return (
        f"{name:34s} TTFT ok {group.attainment.ttft:.3f}, TPOT ok {group.attainment.tpot:.3f}, "
        f"TTFT p99 {group.ttft_s.at(99.0) if group.ttft_s else 0:.2f} s, memory ratio {imbalance(result):.2f}, "
        f"{result.stats.activations} activations"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=180.0)
    seconds = parser.parse_args().seconds
    figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    print(f"8 models, 2 GPUs, {RATE:g} requests/s")
    for name, on in (("with global scheduler", True), ("without", False)):
        result = run(SMALL_8, 2, RATE, seconds, 0.75, global_scheduler=on)
        print(line(name, result), flush=True)
        for style, device in zip(("-", "--"), sorted(result.report.timeline.device_bytes), strict=True):
            points = [(s.t_s, s.mapped_bytes[device] / 1e9) for s in result.report.timeline.samples]
            axis.plot(
                *zip(*points, strict=True), style, color="#c0392b" if on else "#555555", label=f"{name}, {device}"
            )
    axis.set(xlabel="s", ylabel="memory in use, GB", xlim=(0, seconds))
    axis.legend(fontsize=7)
    print(save(figure, "fig10"))


if __name__ == "__main__":
    main()
