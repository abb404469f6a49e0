"""Are our rules better than the paper's where they differ?

Lookahead against the paper's KVPR (``kvpr``), cost-aware against the paper's migration (``migration``), expected idle
time against the paper's eviction order (``eviction``): each switched back alone, then all three. Fleets of 58 models
(``workloads.MIX_58``) on too few, barely enough and enough H100s, over several seeds; every variant gets the same
requests and objectives (P95 alone; TTFT x5, TPOT x2).

    python -m benchmarks.sim.ablation [--seconds 400] [--seeds 3] [--first 1] [--gpus 10,12,16] [--rate 15]

About five minutes of one core. With ``--first N``, seeds before N are taken from docs/results/sim/ablation.json. The
last result is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import matplotlib.pyplot as plt

from benchmarks.sim.plots import OUT, save
from benchmarks.sim.workloads import MIX_58, catalog, h100_cluster, requests
from prism.core.settings import ClusterSettings, EvictionOrder, KvprMode, MigrationTest, PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimSpec, simulate
from prism.trace.generate import preset
from prism.trace.row import TraceRow

PAPER: dict[str, object] = {
    "kvpr": KvprMode.PAPER,
    "migration": MigrationTest.PAPER,
    "eviction": EvictionOrder.PAPER,
}
VARIANTS: dict[str, dict[str, object]] = {
    "ours": {},
    **{f"paper's {key}": {key: value} for key, value in PAPER.items()},
    "paper's three": PAPER,
}
STORE = OUT / "ablation.json"


@dataclass(frozen=True)
class Found:
    """One run."""

    gpus: int
    seed: int
    variant: str
    requests: int
    ttft: float
    tpot: float
    p99_s: float
    activations: int
    migrations: int


def workload(rate: float, seconds: float, seed: int) -> tuple[tuple[ModelSpec, ...], list[TraceRow]]:
    """The catalog with its objectives, and the requests."""
    plain = catalog(MIX_58)
    spec = replace(preset("novita"), rate_rps=rate, duration_s=seconds)
    rows = requests(spec, plain, seed)
    base = dedicated_objectives(plain, rows, h100_cluster(8))
    return with_objectives(plain, base, 5.0, 2.0), rows


def run(models: tuple[ModelSpec, ...], rows: list[TraceRow], gpus: int, seed: int, variant: str) -> Found:
    settings = PolicySettings.named("prism")
    cluster: ClusterSettings = replace(settings.cluster, **VARIANTS[variant])  # type: ignore[arg-type]
    policy = replace(settings, cluster=cluster)
    result = simulate(SimSpec(h100_cluster(gpus), models, policy, lambda: rows, preload_share=0.75))
    group, decisions = result.report.all, result.stats.decisions
    return Found(
        gpus,
        seed,
        variant,
        len(rows),
        group.attainment.ttft,
        group.attainment.tpot,
        group.ttft_s.at(99.0) if group.ttft_s else 0.0,
        result.stats.activations,
        decisions.get("Activate:migration", 0),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--rate", type=float, default=15.0)
    parser.add_argument("--gpus", default="10,12,16")
    args = parser.parse_args()
    before = json.loads(STORE.read_text("utf-8")) if args.first > 1 else []
    found = [Found(**entry) for entry in before if entry["seed"] < args.first]
    for seed in range(args.first, args.seeds + 1):
        models, rows = workload(args.rate, args.seconds, seed)
        for gpus in map(int, args.gpus.split(",")):
            for variant in VARIANTS:
                found.append(run(models, rows, gpus, seed, variant))
                last = found[-1]
                print(
                    f"seed {seed}, {gpus} GPUs, {variant:18s} TTFT ok {last.ttft:.4f}, TPOT ok {last.tpot:.4f}, "
                    f"p99 {last.p99_s:.2f} s, {last.activations} activations, {last.migrations} migrations",
                    flush=True,
                )
    show(found)


def show(found: list[Found]) -> None:
    """The table (means over seeds), the raw numbers and the plot."""
    fleets = sorted({f.gpus for f in found})
    print(
        "\n| rules | " + " | ".join(f"{g} GPUs: TTFT / TPOT met, P99, activations (migrations)" for g in fleets) + " |"
    )
    print("|---" * (len(fleets) + 1) + "|")
    figure, axis = plt.subplots(figsize=(6.5, 3), layout="constrained")
    for number, variant in enumerate(VARIANTS):
        chosen = [[f for f in found if f.gpus == g and f.variant == variant] for g in fleets]
        missed = [1e2 * (1.0 - fmean(f.ttft for f in runs)) for runs in chosen]
        axis.bar([i + 0.16 * (number - 2) for i in range(len(fleets))], missed, width=0.15, label=variant)
        cells = [
            f"{fmean(f.ttft for f in runs):.3f} / {fmean(f.tpot for f in runs):.3f}, "
            f"{fmean(f.p99_s for f in runs):.0f} s, "
            f"{fmean(f.activations for f in runs):.0f} ({fmean(f.migrations for f in runs):.0f})"
            for runs in chosen
        ]
        print(f"| {variant} | " + " | ".join(cells) + " |")
    axis.set(xticks=range(len(fleets)), xticklabels=[f"{g} GPUs" for g in fleets], ylabel="TTFT missed, %")
    axis.legend(fontsize=7)
    print(save(figure, "ablation"))
    STORE.write_text(json.dumps([asdict(f) for f in found], indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    main()
