"""Are our rules better than the paper's where they differ?

Lookahead against the paper's KVPR (``kvpr``), cost-aware against the paper's migration (``migration``), expected idle
time against the paper's eviction order (``eviction``): each switched back alone, then all three; no second instance of
a model; no engine that stands still for others. Fleets of 58 models (``workloads.MIX_58``) on too few, barely enough
and enough H100s; every variant gets the same requests and objectives (P95 alone; TTFT x5, TPOT x2).

    python -m benchmarks.sim.ablation --work DIR [--seconds 400] [--draws 3] [--gpus 10,12,16] [--rate 15]
    python -m benchmarks.sim.ablation --work DIR --write

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache, partial
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.sim import harness, variants
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.plots import OUT, save
from benchmarks.sim.workloads import MIX_58, catalog, h100_cluster, requests
from prism.core.specs import ModelSpec
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.trace.generate import preset
from prism.trace.row import TraceRow

OURS = variants.PRISM
WHO = (OURS, variants.ALONE, variants.NO_PAUSES, *variants.PAPER)


@lru_cache(maxsize=1)
def workload(pieces: Pieces, draw: int, rate: float, seconds: float) -> tuple[tuple[ModelSpec, ...], list[TraceRow]]:
    """The catalog with its objectives, and the requests."""
    plain = catalog(MIX_58)
    rows = requests(replace(preset("novita"), rate_rps=rate, duration_s=seconds), plain, draw)
    name = f"objectives ablation {draw} {rate:g} {seconds:g}"
    base = pieces.kept(name, lambda: dict(dedicated_objectives(plain, rows, h100_cluster(8))))
    return with_objectives(plain, {key: (value[0], value[1]) for key, value in base.items()}, 5.0, 2.0), rows


def run(pieces: Pieces, draw: int, gpus: int, who: str, rate: float, seconds: float) -> dict[str, Any]:
    models, rows = workload(pieces, draw, rate, seconds)
    result = variants.run(who, h100_cluster(gpus), models, rows)
    group, decisions = result.report.all, result.stats.decisions
    return {
        "requests": len(rows),
        "both": group.attainment.both,
        "ttft": group.attainment.ttft,
        "tpot": group.attainment.tpot,
        "p99_s": group.ttft_s.at(99.0) if group.ttft_s else 0.0,
        "activations": result.stats.activations,
        "migrations": decisions.get("Activate:migration", 0),
        "never_ended": result.stats.never_ended,
    }


def name_of(draw: int, gpus: int, who: str) -> str:
    return f"ablation {draw} {gpus} {who}"


def show(pieces: Pieces, draws: tuple[int, ...], fleets: tuple[int, ...]) -> None:
    """The table (means over the draws that are complete), the raw numbers and the plot."""
    heads = [f"{gpus} GPUs: goodput (TTFT / TPOT), P99, activations (migrations)" for gpus in fleets]
    print("\n| rules | " + " | ".join(heads) + " |\n" + "|---" * (1 + len(fleets)) + "|")
    whole = [d for d in draws if all(pieces.get(name_of(d, gpus, who)) for gpus in fleets for who in WHO)]
    found = {(who, gpus): [pieces.get(name_of(d, gpus, who)) or {} for d in whole] for who in WHO for gpus in fleets}
    figure, axis = plt.subplots(figsize=(6.5, 3), layout="constrained")
    for number, who in enumerate(WHO if whole else ()):
        cells, missed = [], []
        for gpus in fleets:
            mean = {key: fmean(run[key] for run in found[who, gpus]) for key in found[who, gpus][0]}
            missed.append(1e2 * (1.0 - mean["both"]))
            cells.append(
                f"{mean['both']:.3f} ({mean['ttft']:.3f} / {mean['tpot']:.3f}), {mean['p99_s']:.0f} s, "
                f"{mean['activations']:.0f} ({mean['migrations']:.0f})"
            )
        axis.bar([i + 0.14 * (number - 2.5) for i in range(len(fleets))], missed, width=0.13, label=who)
        print(f"| {'ours' if who == OURS else who} | " + " | ".join(cells) + " |")
    print(f"draws: {', '.join(map(str, whole))}")
    axis.set(xticks=range(len(fleets)), xticklabels=[f"{g} GPUs" for g in fleets], ylabel="goodput missed, %")
    axis.legend(fontsize=7)
    print(save(figure, "ablation"))
    entries = [{"who": who, "gpus": gpus, "runs": runs} for (who, gpus), runs in found.items()]
    (OUT / "ablation.json").write_text(json.dumps(entries, indent=0) + "\n", "utf-8")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--rate", type=float, default=15.0)
    parser.add_argument("--gpus", default="10,12,16")
    args = parser.parse_args()
    pieces, draws = Pieces(args.work), harness.chosen_draws(args)
    fleets = tuple(map(int, args.gpus.split(",")))
    if args.write:
        show(pieces, draws, fleets)
        return
    wanted = (
        (name_of(draw, gpus, who), partial(run, pieces, draw, gpus, who, args.rate, args.seconds))
        for draw in draws
        for gpus in fleets
        for who in WHO
    )
    harness.make(args, pieces, wanted)


if __name__ == "__main__":
    main()
