"""What does live scaling do to half an hour of bursty traffic, part by part (BlitzScale, Figures 17, 18, 20 and 21)?

Simulated, in colocation (the paper's figures are with prefill and decode apart; its Figure 24 has colocation), on the
paper's cluster A: modelled A800s with 100 Gbit/s of network, 128 Gbit/s to host memory and 10 Gbit/s from SSDs each.
Arrivals come from the trace generator (minutes of load and minutes of rest) at half of what all instances can serve,
as in the paper; its traces are not in this repository. Lengths: BurstGPT's place is taken by ShareGPT's, AzureConv's
are its own; AzureCode's are not here. Every system is scaled by the same policy. "half of it" is a fixed fleet of half
of the instances, "all of it" one of all (the paper's DistServe (half) and (full)). In time: as in the paper, requests
whose time to the first token and mean time between tokens are at most five times the mean of the fleet that has all.

    python -m benchmarks.live.workloads [--figure21 | --only 8B]

Results: docs/results/live-scaling.md.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Final

from prism.core.specs import ModelSpec
from prism.sim.gpus import gpu
from prism.sim.live_arrivals import LiveLinks, LiveSystem
from prism.sim.live_scaling import LiveFleet, LiveOutcome, LiveScaling
from prism.sim.live_server import LiveJob
from prism.sim.models import known_spec
from prism.sim.roofline import step_cost
from prism.trace.generate import GeneratorSpec, generate

CASES: Final = (
    ("72B, bursts of ShareGPT", "Qwen/Qwen2.5-72B-Instruct", 4, 8, "sharegpt"),
    ("24B, AzureConv's lengths", "mistralai/Mistral-Small-24B-Instruct-2501", 1, 32, "azure-conv"),
    ("8B, AzureConv's lengths", "meta-llama/Llama-3.1-8B-Instruct", 1, 16, "azure-conv"),
)
PARTS: Final = {
    LiveSystem.SERVERLESSLLM: "ServerlessLLM",
    LiveSystem.ALLCACHE: "AllCache",
    LiveSystem.FAASNET: "+ network, in a tree",
    LiveSystem.MULTICAST: "+ multicast",
    LiveSystem.ZIGZAG: "+ ZigZag",
    LiveSystem.PRISM: "**chosen**",
}
SECONDS: Final = 1800.0
LONGEST: Final = 3000
LATE: Final = 5.0


def links(tp: int) -> LiveLinks:
    """Of one instance, with its share of what its machine has: each GPU's."""
    return LiveLinks(network_bytes_s=12.5e9 * tp, host_bytes_s=16e9 * tp, disk_bytes_s=1.25e9 * tp)


def jobs_of(spec: ModelSpec, machines: int, lengths: str, seed: int) -> list[LiveJob]:
    """Half of what ``machines`` instances can serve, on average."""
    drawn = list(generate(GeneratorSpec(models=1, duration_s=SECONDS, rate_rps=1.0, groups=1, lengths=lengths), seed))
    prompts, answers = (
        statistics.mean(min(row.prompt_tokens or 1, LONGEST) for row in drawn),
        statistics.mean(row.output_tokens or 1 for row in drawn),
    )
    cost, batch = step_cost(spec, gpu("A800")), 32
    token_s = cost.decode(batch, int(batch * (prompts + answers / 2)))[0].first_s / batch
    per_s = 1.0 / (prompts / cost.prefill_tokens_per_s(512) + answers * token_s)
    rows = generate(
        GeneratorSpec(models=1, duration_s=SECONDS, rate_rps=0.5 * machines * per_s, groups=1, lengths=lengths), seed
    )
    return [LiveJob(r.arrival_s, min(r.prompt_tokens or 1, LONGEST), r.output_tokens or 1) for r in rows]


def play(system: LiveSystem, spec: ModelSpec, machines: int, jobs: list[LiveJob], start_with: int = 1) -> LiveOutcome:
    fleet = LiveFleet(spec, gpu("A800"), machines, links=links(spec.tp), batch=32, start_with=start_with)
    return LiveScaling(system, fleet, [LiveJob(j.arrival_s, j.prompt_tokens, j.answer_tokens) for j in jobs]).run()


def tokens_s(outcome: LiveOutcome) -> list[float]:
    """Mean times between the tokens of each request that has several."""
    return [
        (j.end_s - j.first_s) / (j.made - 1)
        for j in outcome.jobs
        if j.end_s is not None and j.first_s is not None and j.made > 1
    ]


def in_time(outcome: LiveOutcome, ttft_s: float, tbt_s: float) -> float:
    """Part of the requests."""
    good = 0
    for job in outcome.jobs:
        if job.first_s is None or job.end_s is None:
            continue
        token_s = (job.end_s - job.first_s) / max(1, job.made - 1)
        good += job.first_s - job.arrival_s <= LATE * ttft_s and token_s <= LATE * tbt_s
    return good / len(outcome.jobs)


def compare(label: str, spec: ModelSpec, machines: int, lengths: str) -> None:
    jobs = jobs_of(spec, machines, lengths, seed=1)
    full = play(LiveSystem.IDEAL, spec, machines, jobs, start_with=machines)
    usual = statistics.mean(full.ttft_s()), statistics.mean(tokens_s(full))
    half = play(LiveSystem.IDEAL, spec, machines // 2, jobs, start_with=machines // 2)
    rows = [("all of it", full), ("half of it", half)]
    rows += [(name, play(system, spec, machines, jobs)) for system, name in PARTS.items()]
    for name, outcome in rows:
        ttft = outcome.ttft_s()
        cells = (
            f"{1000 * statistics.mean(ttft):.0f}",
            f"{1000 * ttft[int(0.95 * len(ttft))]:.0f}",
            f"{1000 * statistics.mean(tokens_s(outcome)):.1f}",
            f"{in_time(outcome, *usual):.1%}",
            f"{outcome.device_s / full.device_s:.2f}",
        )
        print(f"| {label} ({len(jobs)} requests) | {name} | {' | '.join(cells)} |", flush=True)


def figure21() -> None:
    """Six instances of 24B at once, beside two that serve; requests that keep all busy, with answers of 64 to 192
    tokens: with equal ones those that began together prefill together, so that the ideal's peak is a moment in which
    all decode. Throughput is that of a whole second, since a full batch's prefill takes as long."""
    spec = known_spec("24B", CASES[1][1], 1.0, 0.1, 1)
    jobs = [LiveJob(0.0, 128, 64 + 37 * i % 129) for i in range(8 * 96)]
    print("| system | a quarter of the ideal's, s | half, s | nine tenths, s | ends, s |\n|---|---|---|---|---|")
    fleet = LiveFleet(spec, gpu("A800"), 8, links=links(1), batch=32, most_sources=2, start_with=2, at_once=6)
    peak = max(seconds_of(scaled(LiveSystem.IDEAL, fleet, jobs)).values())
    for system in (LiveSystem.ZIGZAG, LiveSystem.PIPELINES, LiveSystem.PRISM, LiveSystem.ALLCACHE, LiveSystem.IDEAL):
        seconds = seconds_of(scaled(system, fleet, jobs))
        ends = (next((s for s in sorted(seconds) if seconds[s] >= part * peak), None) for part in (0.25, 0.5, 0.9))
        cells = ("never" if end is None else f"{end / 10:.1f}" for end in ends)
        print(f"| {system.value} | {' | '.join(cells)} | {max(seconds) / 10:.1f} |")


def scaled(system: LiveSystem, fleet: LiveFleet, jobs: list[LiveJob]) -> LiveOutcome:
    return LiveScaling(system, fleet, [replace(job) for job in jobs]).run()


def seconds_of(outcome: LiveOutcome) -> dict[int, int]:
    """Tokens of the second that ends with each tenth of a second (counted from 1)."""
    tokens = outcome.tokens
    return {end: sum(tokens[i] for i in range(max(0, end - 10), end)) for end in range(1, max(tokens) + 2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure21", action="store_true")
    parser.add_argument("--only", default="", help="what the label of a model begins with")
    args = parser.parse_args()
    if args.figure21:
        figure21()
        return
    print("| model | system | mean TTFT, ms | p95, ms | mean TBT, ms | in time | device time / all of it |")
    print("|---|---|---|---|---|---|---|")
    for label, path, tp, machines, lengths in CASES:
        if label.startswith(args.only):
            compare(label, known_spec(label, path, 1.0, 0.1, tp), machines, lengths)


if __name__ == "__main__":
    main()
