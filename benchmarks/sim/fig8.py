"""Figure 8: how much KV memory and throughput does sharing memory on demand give two models on one GPU?

Two Llama-2-7B-sized models (large KV per token) on one H100 of which they may use 44 GiB (about 20 GB for KV). For 20 s
model A has most of the requests, then B. `prism`
(memory on demand) against `static` (half of the KV memory each).

    python -m benchmarks.sim.fig8

The last result is in docs/results/sim.md.
"""

from __future__ import annotations

import random

import matplotlib.pyplot as plt

from benchmarks.sim.plots import save
from prism.core.settings import PolicySettings
from prism.sim.cluster_file import parse_cluster
from prism.sim.cluster_sections import Cluster
from prism.sim.models import known_spec
from prism.sim.run import SimSpec, simulate
from prism.trace.report import Report
from prism.trace.row import TraceRow

SPAN_S, TURN_S = 60.0, 20.0
HIGH_RPS, LOW_RPS = 6.0, 1.0
PROMPT, OUTPUT = 900, 300
MEMORY = "44GiB"


def rows() -> list[TraceRow]:
    """A leads until TURN_S, then B."""
    rng = random.Random(1)
    found = []
    for name, first, second in (("A", HIGH_RPS, LOW_RPS), ("B", LOW_RPS, HIGH_RPS)):
        at_s = 0.0
        while at_s < SPAN_S:
            at_s += rng.expovariate(first if at_s < TURN_S else second)
            tokens = int(rng.uniform(0.5, 1.5) * PROMPT), int(rng.uniform(0.5, 1.5) * OUTPUT)
            found.append(TraceRow(at_s, name, *tokens))
    return sorted(found, key=lambda row: row.arrival_s)


def cluster() -> Cluster:
    return parse_cluster({"groups": [{"gpu": "H100", "gpus_per_node": 1, "memory": MEMORY}]}, "fig8")


def run(policy: str) -> Report:
    models = tuple(known_spec(name, "meta-llama/Llama-2-7b-chat-hf", 1.0, 0.1) for name in ("A", "B"))
    settings = PolicySettings.named(policy)
    return simulate(SimSpec(cluster(), models, settings, rows, sample_every_s=0.5, preload_share=0.75)).report


def total_kv(report: Report) -> list[tuple[float, float]]:
    return [(s.t_s, sum(s.model_bytes.values()) / 1e9) for s in report.timeline.samples if s.t_s <= SPAN_S]


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for policy in ("prism", "static"):
        report = run(policy)
        kv = total_kv(report)
        late = [gb for t, gb in kv if t > TURN_S]
        left.plot(*zip(*kv, strict=True), label=policy)
        right.bar(policy, report.output_tokens_per_s)
        ttft = report.all.ttft_s
        mean_gb, late_gb = (sum(values) / len(values) for values in ([gb for _, gb in kv], late))
        print(
            f"{policy}: KV mean {mean_gb:.1f} GB (after {TURN_S:g} s {late_gb:.1f}), "
            f"{report.output_tokens_per_s:.0f} tokens/s over {report.span_s:.0f} s, "
            f"TTFT p50 {ttft.at(50.0) if ttft else 0:.2f} s, p99 {ttft.at(99.0) if ttft else 0:.2f} s, "
            f"TTFT ok {report.all.attainment.ttft:.1%}"
        )
    left.set(xlabel="s", ylabel="KV of both models, GB", title="memory in use")
    left.axvline(TURN_S, color="#999999", linestyle="--")
    left.legend()
    right.set(ylabel="output tokens/s", title="throughput until all are served")
    print(save(figure, "fig8"))


if __name__ == "__main__":
    main()
