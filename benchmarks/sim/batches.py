"""What is met of batches of requests for one model that has its GPUs to itself?

Llama 3.3 70B on four H100s, asked every 30 s for a batch within half a second, for two minutes; TTFT 2 s, TPOT 50 ms.
Nothing is decided but which prompt begins when. Everybody starts warm and knows the trace's means.

    python -m benchmarks.sim.batches [--draws 3] [--batches 75,100,125,150,200]

The last result is in docs/results/scheduler.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Final

from benchmarks.sim import variants
from benchmarks.sim.workloads import catalog, h100_cluster
from prism.core.specs import ModelSpec
from prism.sim.run import SimSpec, simulate
from prism.trace.row import TraceRow

MODEL: Final = ("meta-llama/Llama-3.3-70B-Instruct", 1, 4)
WHO: Final = (variants.PRISM, "static", "serverlessllm")
SECONDS, EVERY_S, BEGINS_S, LASTS_S = 120.0, 30.0, 3.0, 0.5
_LogNormal = tuple[float, float]
LENGTHS: Final[Mapping[str, tuple[_LogNormal, _LogNormal]]] = {
    "long answers": ((5.0, 0.8), (6.3, 0.5)),
    "short answers": ((6.5, 0.6), (1.0, 0.5)),
}
"""Logarithms' mean and standard deviation, of tokens in a prompt and in an answer: 150 and 540, 670 and 3."""


def rows_of(model: ModelSpec, batch: int, lengths: str, draw: int) -> list[TraceRow]:
    rng = random.Random(f"batches {draw}")
    prompt, answer = LENGTHS[lengths]
    found: list[TraceRow] = []
    at_s = BEGINS_S
    while at_s < SECONDS:
        for _ in range(batch):
            tokens = max(4, int(rng.lognormvariate(*prompt))), max(1, int(rng.lognormvariate(*answer)))
            found.append(TraceRow(at_s + rng.uniform(0.0, LASTS_S), str(model.name), *tokens))
        at_s += EVERY_S
    return sorted(found, key=lambda row: row.arrival_s)


def met(who: str, batch: int, lengths: str, draw: int) -> float:
    """Share of the requests whose two objectives are both met."""
    models = tuple(replace(m, slo_ttft_s=2.0, slo_tpot_s=0.05) for m in catalog((MODEL,)))
    rows = rows_of(models[0], batch, lengths, draw)
    cluster = h100_cluster(MODEL[2])
    result = simulate(SimSpec(cluster, models, variants.settings(who, rows), lambda: rows, preload_share=1.0))
    return result.report.all.attainment.both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--batches", default="75,100,125,150,200")
    args = parser.parse_args()
    batches = tuple(map(int, args.batches.split(",")))
    for lengths in LENGTHS:
        print(f"\n| {lengths}: goodput, requests in a batch | " + " | ".join(map(str, batches)) + " |")
        print("|---" * (1 + len(batches)) + "|")
        for who in WHO:
            shares = [mean(met(who, batch, lengths, draw) for draw in range(1, args.draws + 1)) for batch in batches]
            print(f"| {who} | " + " | ".join(f"{share:.3f}" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
