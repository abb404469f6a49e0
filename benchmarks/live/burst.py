"""What does live scaling do to a burst of 60 requests/s, and to 30 minutes of bursts (lambda-Scale 14 and 15)?

Simulated on modelled H800s, 400 Gbit/s links. A burst: 10 s at 1 request/s, 20 s at 60, 20 s at 1, Llama 8B on 8, 13B
on 16 and 70B (four GPUs each) on 64 GPUs. Half an hour, 13B on 12 GPUs: arrivals of the trace generator with minutes of
load and minutes of rest (the paper takes a part of BurstGPT, which is not in this repository). Lengths are those of
Azure's conversations. Every system is scaled by the same policy, one instance stays; machines keep what left in host
memory for a minute. "before" is the multicast without serving meanwhile; "fixed" has all machines all the time.

    python -m benchmarks.live.burst [--figure14]

Results: docs/results/live-scaling.md.
"""

from __future__ import annotations

import sys
from typing import Final, TypeAlias

import numpy as np

from prism.core.specs import ModelSpec
from prism.sim.gpus import gpu
from prism.sim.live_arrivals import LiveSystem
from prism.sim.live_scaling import LiveFleet, LiveOutcome, LiveScaling
from prism.sim.live_server import LiveJob
from prism.sim.models import known_spec
from prism.trace.generate import GeneratorSpec, generate
from prism.trace.lengths import length_table

CASES: Final = (
    ("8B, 8 GPUs", "meta-llama/Llama-3.1-8B-Instruct", 1, 8),
    ("13B, 16 GPUs", "meta-llama/Llama-2-13b-chat-hf", 1, 16),
    ("70B, 64 GPUs", "meta-llama/Llama-3.3-70B-Instruct", 4, 16),
)
NAMES: Final = {LiveSystem.MULTICAST: "before (replicas as they were)", LiveSystem.PRISM: "**prism (chosen)**"}
HALF_HOUR: Final = (("13B, 12 GPUs", "meta-llama/Llama-2-13b-chat-hf", 1, 12),)
"""The paper's first testbed."""
Steps: TypeAlias = tuple[tuple[float, float], ...]
"""Seconds and requests/s, one after the other; the last step is after the burst."""
STEPS: Final[Steps] = ((10.0, 1.0), (20.0, 60.0), (20.0, 1.0))
LONGEST: Final = 3000
"""Tokens of a prompt: Llama 2 has 4096."""
FIXED: Final = "fixed fleet"


def rising(rise_s: float) -> Steps:
    """:data:`STEPS`, with ``rise_s`` more in which the rate rises to the burst's, second by second."""
    before, burst, after = STEPS
    seconds = round(rise_s)
    rates = (before[1] + (burst[1] - before[1]) * (i + 0.5) / seconds for i in range(seconds))
    return (before, *((1.0, rate) for rate in rates), burst, after)


def burst_jobs(seed: int, steps: Steps = STEPS) -> list[LiveJob]:
    rng, table = np.random.default_rng(seed), length_table("azure-conv")
    jobs: list[LiveJob] = []
    start_s = 0.0
    for length_s, per_s in steps:
        times = np.sort(rng.uniform(start_s, start_s + length_s, rng.poisson(per_s * length_s)))
        for at_s in times.tolist():
            prompt, answer = table.draw(rng)
            jobs.append(LiveJob(at_s, min(prompt, LONGEST), answer))
        start_s += length_s
    return jobs


def half_hour(seed: int) -> list[LiveJob]:
    spec = GeneratorSpec(models=1, duration_s=1800.0, rate_rps=8.0, groups=1, lengths="azure-conv")
    return [
        LiveJob(row.arrival_s, min(row.prompt_tokens or 1, LONGEST), row.output_tokens or 1)
        for row in generate(spec, seed)
    ]


def play(system: LiveSystem, spec: ModelSpec, machines: int, jobs: list[LiveJob], start_with: int = 1) -> LiveOutcome:
    fleet = LiveFleet(spec, gpu("H800"), machines, start_with=start_with)
    return LiveScaling(system, fleet, [LiveJob(j.arrival_s, j.prompt_tokens, j.answer_tokens) for j in jobs]).run()


def line(label: str, name: str, spec: ModelSpec, outcome: LiveOutcome, ideal_s: float) -> str:
    ttft = outcome.ttft_s()
    met = sum(t <= spec.slo_ttft_s for t in ttft) / len(outcome.jobs)
    middle, late = ttft[len(ttft) // 2], ttft[int(0.9 * len(ttft))]
    pause = f"{1e3 * max(outcome.pauses_s):.0f}" if outcome.pauses_s else ""
    cells = (f"{met:.1%}", f"{middle:.2f}", f"{late:.2f}", f"{ttft[-1]:.2f}", f"{outcome.device_s:.0f}")
    return f"| {label} | {name} | {' | '.join(cells)} | {outcome.device_s / ideal_s:.2f} | {outcome.most} | {pause} |"


def main() -> None:
    long = "--figure14" in sys.argv[1:]
    print("| model | system | in time (1 s) | median, s | p90, s | last, s | device s | / ideal | most | pause, ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for label, path, tp, machines in HALF_HOUR if long else CASES:
        spec = known_spec(label, path, 1.0, 0.1, tp)
        jobs = half_hour(1) if long else burst_jobs(1)
        ideal_s = play(LiveSystem.IDEAL, spec, machines, jobs).device_s
        for system in LiveSystem:
            outcome = play(system, spec, machines, jobs)
            print(line(label, NAMES.get(system, system.value), spec, outcome, ideal_s), flush=True)
        fixed = play(LiveSystem.IDEAL, spec, machines, jobs, start_with=machines)
        print(line(label, FIXED, spec, fixed, ideal_s), flush=True)


if __name__ == "__main__":
    main()
