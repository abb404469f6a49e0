"""How fast does throughput rise when one model goes to eight machines at once (lambda-Scale, Figures 9 to 12, 16)?

Simulated on modelled H800s with the paper's links (Table 1: 400 Gbit/s, host memory 64 GB/s, SSD 5 GB/s), eight
machines that receive (Llama-2 70B: two, of four GPUs each, as there are six). Requests of 128 tokens and 128 answer
tokens that all come at 0: enough to keep every machine busy. Told is when throughput first reaches half and nine tenths
of what all machines make together, in windows of 0.1 s, and for 50 requests (Figure 12) when the last one began.

    python -m benchmarks.live.ramp

Results: docs/results/live-scaling.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from prism.core.specs import ModelSpec
from prism.sim.gpus import gpu
from prism.sim.live_arrivals import LiveLinks, LiveSystem
from prism.sim.live_scaling import LiveFleet, LiveOutcome, LiveScaling
from prism.sim.live_server import LiveJob
from prism.sim.models import known_spec

MODELS: Final = (
    ("7B", "meta-llama/Llama-2-7b-chat-hf", 1, 8),
    ("13B", "meta-llama/Llama-2-13b-chat-hf", 1, 8),
    ("70B", "meta-llama/Llama-3.3-70B-Instruct", 4, 2),
)
RIVALS: Final = (LiveSystem.FAASNET, LiveSystem.NCCL, LiveSystem.SERVERLESSLLM, LiveSystem.IDEAL)
EVEN: Final = LiveLinks(stage_wait=0.0)
"""Stages of a pipeline overlap without a gap, as the paper has it; the default is what the prototype here showed."""


@dataclass(frozen=True, slots=True)
class RampRow:
    """One line of a figure."""

    figure: str
    label: str
    system: LiveSystem
    sources: int = 1
    cached: int = 0
    links: LiveLinks = EVEN


ROWS: Final = (
    *(RampRow("9, 16", f"pipelines, k = {k}", LiveSystem.PIPELINES, k) for k in (1, 2, 4)),
    *(RampRow("9, 16", f"pipelines as measured, k = {k}", LiveSystem.PIPELINES, k, links=LiveLinks()) for k in (2, 4)),
    RampRow("9", "pairs (BlitzScale), k = 1", LiveSystem.ZIGZAG),
    RampRow("9", "chosen, k = 1", LiveSystem.PRISM, links=LiveLinks()),
    *(RampRow("9", f"{system.value}, k = 1", system) for system in RIVALS),
    RampRow("10 (host memory)", "pipelines", LiveSystem.PIPELINES, cached=8),
    RampRow("10 (host memory)", "pipelines as measured", LiveSystem.PIPELINES, cached=8, links=LiveLinks()),
    RampRow("10 (host memory)", "serverlessllm", LiveSystem.SERVERLESSLLM, cached=8),
    RampRow("11 (cold)", "pipelines", LiveSystem.PIPELINES, 0),
    RampRow("11 (cold)", "serverlessllm", LiveSystem.SERVERLESSLLM, 0),
)


def play(row: RampRow, spec: ModelSpec, receivers: int, requests: int) -> LiveOutcome:
    fleet = LiveFleet(
        spec,
        gpu("H800"),
        receivers + row.sources,
        links=row.links,
        batch=32,
        most_sources=max(1, row.sources),
        start_with=row.sources,
        cached=row.cached,
        at_once=receivers,
    )
    return LiveScaling(row.system, fleet, [LiveJob(0.0, 128, 128) for _ in range(requests)]).run()


def reaches(outcome: LiveOutcome, tokens_per_s: float) -> str:
    """The end of the first tenth of a second that made so many; or that all was done before, by who was there."""
    ends = ((i + 1) / 10 for i in range(max(outcome.tokens) + 1) if outcome.tokens[i] * 10 >= tokens_per_s)
    found = next(ends, None)
    return f"> {(max(outcome.tokens) + 1) / 10:.1f}" if found is None else f"{found:.1f}"


def main() -> None:
    print("| model | figure | system | half, s | nine tenths, s | last of 50 begins, s |\n|---|---|---|---|---|---|")
    for name, path, tp, receivers in MODELS:
        spec = known_spec(name, path, 1.0, 0.1, tp)
        for row in ROWS:
            requests = 64 * (receivers + row.sources)
            all_there = play(replace(row, system=LiveSystem.IDEAL), spec, receivers, requests)
            peak = 10 * sorted(all_there.tokens.values())[-3]
            ramp, fifty = play(row, spec, receivers, requests), play(row, spec, receivers, 50)
            half, most = reaches(ramp, 0.5 * peak), reaches(ramp, 0.9 * peak)
            last = fifty.ttft_s()[-1]
            print(f"| {name} | {row.figure} | {row.label} | {half} | {most} | {last:.2f} |")


if __name__ == "__main__":
    main()
