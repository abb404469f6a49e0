"""Figure 11: what is scheduling requests per GPU (Moore-Hodgson over one queue) worth to models with tight objectives?

Two 8B models on one H100 of which they may use 44 GiB (about 100,000 tokens of KV): model1 with long
prompts and a loose objective, model2 with short prompts and a tight one.
Moore-Hodgson against first come first served over the same queue, and against greedy engines with queues of their own.

    python -m benchmarks.sim.fig11

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import random
from dataclasses import replace

import matplotlib.pyplot as plt

from benchmarks.sim.plots import save
from prism.core.settings import Admission, PolicySettings
from prism.sim.cluster_file import parse_cluster
from prism.sim.cluster_sections import Cluster
from prism.sim.models import known_spec
from prism.sim.run import SimResult, SimSpec, simulate
from prism.trace.row import TraceRow

SPAN_S = 120.0


def rows() -> list[TraceRow]:
    """Bursts of long prompts for model1, a steady stream of short ones for model2."""
    rng, found = random.Random(2), []
    at_s = 0.0
    while at_s < SPAN_S:
        at_s += rng.expovariate(1 / 8.0)
        found += [
            TraceRow(at_s + 0.01 * i, "model1", rng.randint(6000, 12000), rng.randint(200, 500))
            for i in range(rng.randint(6, 16))
        ]
    at_s = 0.0
    while at_s < SPAN_S:
        at_s += rng.expovariate(10.0)
        found.append(TraceRow(at_s, "model2", rng.randint(100, 500), rng.randint(50, 200)))
    return sorted((row for row in found if row.arrival_s < SPAN_S), key=lambda row: row.arrival_s)


def cluster() -> Cluster:
    return parse_cluster({"groups": [{"gpu": "H100", "gpus_per_node": 1, "memory": "44GiB"}]}, "fig11")


def run(admission: Admission) -> SimResult:
    path = "meta-llama/Llama-3.1-8B-Instruct"
    models = (known_spec("model1", path, 8.0, 0.2), known_spec("model2", path, 0.5, 0.2))
    settings = PolicySettings.named("prism")
    policy = replace(settings, gpu=replace(settings.gpu, admission=admission))
    return simulate(SimSpec(cluster(), models, policy, rows, sample_every_s=0.5, preload_share=0.75))


def main() -> None:
    figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
    for admission in (Admission.MOORE_HODGSON, Admission.FCFS, Admission.GREEDY):
        result = run(admission)
        shares = {g.name: g.attainment.ttft for g in result.report.models}
        tails = {g.name: g.ttft_s.at(99.0) for g in result.report.models if g.ttft_s}
        points = [(s.t_s, s.queued.get("model2", 0)) for s in result.report.timeline.samples]
        axis.plot(*zip(*points, strict=True), label=admission.value)
        print(
            f"{admission.value:14s} "
            + ", ".join(f"{n}: TTFT ok {shares[n]:.3f}, p99 {tails[n]:.2f} s" for n in sorted(shares))
        )
    axis.set(xlabel="s", ylabel="model2 requests waiting", xlim=(0, SPAN_S))
    axis.legend(fontsize=8)
    print(save(figure, "fig11"))


if __name__ == "__main__":
    main()
