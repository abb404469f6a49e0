"""The same burst on GPUs that are not here: AQUA's Figures 8 and 13 on modelled H100s and A100s.

    python -m benchmarks.kv.burst_model [--draws 5]

One engine, step by step (:mod:`benchmarks.kv.burst_engine`); lengths are drawn from recorded ones. The stable rate is
the largest, by halving, at which first come first served costs requests a second each on average beyond what they take
alone; then 25 requests at that rate and a minute at ``burst`` times. Medians over draws of the lengths.

Figure 13 is of Yi-34B, whose weights leave an A100 room for four such prompts: its stable rate is what memory holds,
not what the device computes, and three times that is more than it computes, but not by much. The recorded arXiv lengths
end at 4k tokens; the paper's have a median of 7k.

Two rows say what is left to gain. *No memory limit*: the same engine with room for everybody's KV, so that nobody waits
for memory. *Prompts alone*: besides, answers end with their first token, and all steps are prompts'. First come is the
order with the least highest wait of all orders then: what is above that row is decoding's and memory's share.

Goal: highest first-token time over the peer 1/20 of first come's at 1.2 times the time per token. Result:
docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmarks.kv.burst_engine import BurstEngine, BurstJob
from prism.sim.gpus import GpuKind, gpu
from prism.sim.machines import USABLE
from prism.sim.models import known_spec
from prism.sim.roofline import StepCost, step_cost
from prism.trace.lengths import TABLES, LengthTable

WAYS: Final = ("first come", "fair, host", "fair, peer", "no memory limit", "prompts alone")
_UNLIMITED_TOKENS: Final = 1 << 40
CASES: Final = (
    ("Figure 8", "meta-llama/Llama-3.3-70B-Instruct", 2, "H100", "sharegpt", 2),
    ("Figure 8", "meta-llama/Llama-3.3-70B-Instruct", 2, "A100", "sharegpt", 2),
    ("Figure 13", "01-ai/Yi-1.5-34B-Chat", 1, "A100", "arxiv, long", 3),
    ("Figure 13", "01-ai/Yi-1.5-34B-Chat", 1, "A100", "arxiv", 3),
    ("Figure 13", "Qwen/Qwen2.5-32B-Instruct", 1, "A100", "arxiv", 3),
)
_LONG: Final = LengthTable(
    "arxiv, long",
    (1476, 2335, 3229, 3837, 5122, 7059, 9729, 12985, 15434, 16000, 16000),
    (47, 73, 99, 117, 153, 208, 282, 371, 437, 595, 919),
    0.0,
)
"""The data set that the paper names (section 9.1): lognormal by its median and 90% in Sarathi-Serve (Table 2)."""
LENGTHS: Final = {**TABLES, _LONG.name: _LONG}


def jobs_at(times_s: Sequence[float], lengths: str, seed: int) -> list[BurstJob]:
    rng = np.random.default_rng(seed)
    return [BurstJob(str(i), at_s, *LENGTHS[lengths].draw(rng)) for i, at_s in enumerate(times_s)]


def first_tokens(done: Sequence[BurstJob]) -> list[float]:
    return sorted(job.first_s - job.at_s for job in done)


def stable_rate(cost: StepCost, memory_tokens: int, lengths: str) -> float:
    def mean_s(rate: float) -> float:
        steady = jobs_at([i / rate for i in range(100)], lengths, 3)
        return statistics.mean(first_tokens(BurstEngine(cost, memory_tokens, None).run(steady)))

    low, high = 0.02, 32.0
    most_s = mean_s(0.001) + 1.0
    for _ in range(10):
        rate = (low * high) ** 0.5
        low, high = (rate, high) if mean_s(rate) < most_s else (low, rate)
    return low


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way did to the requests of one draw."""

    highest_s: float
    most_s: float
    """First token of nine of ten requests at most."""
    token_ms: float
    paged_s: float


def outcome(engine: BurstEngine, coming: Sequence[BurstJob]) -> Outcome:
    done = engine.run(coming)
    waits = first_tokens(done)
    each_ms = statistics.median(1000 * (j.end_s - j.first_s) / max(1, j.generated - 1) for j in done)
    return Outcome(waits[-1], waits[int(0.9 * len(waits))], each_ms, engine.paged_s)


def engines(cost: StepCost, memory_tokens: int, shard_bytes: float, kind: GpuKind) -> dict[str, BurstEngine]:
    """A fresh one for each way."""
    host_s, peer_s = shard_bytes / (kind.pcie_bytes_per_s * kind.pcie_efficiency), shard_bytes / kind.nvlink_bytes_per_s
    made = [BurstEngine(cost, memory_tokens, copy_s) for copy_s in (None, host_s, peer_s)]
    made += [BurstEngine(cost, _UNLIMITED_TOKENS, None) for _ in range(2)]
    return dict(zip(WAYS, made, strict=True))


def print_case(case: tuple[str, str, int, str, str, int], draws: int) -> None:
    figure, name, tp, kind_name, lengths, burst = case
    kind, model = gpu(kind_name), known_spec(name, name, 1.0, 0.1, tp)
    room_bytes = tp * (kind.memory_bytes * USABLE - kind.process_bytes) - model.weight_bytes
    memory, cost = int(room_bytes / model.shape.kv_bytes_per_token), step_cost(model, kind)
    low = stable_rate(cost, memory, lengths)
    times_s = [i / low for i in range(25)]
    times_s += [times_s[-1] + (i + 1) / (burst * low) for i in range(int(60 * burst * low))]
    found: dict[str, list[Outcome]] = {way: [] for way in WAYS}
    for draw in range(draws):
        for way, engine in engines(cost, memory, model.shape.kv_bytes_per_token / tp, kind).items():
            coming = jobs_at(times_s, lengths, 5 + draw)
            if way == "prompts alone":
                coming = [replace(job, answer=1) for job in coming]
            found[way].append(outcome(engine, coming))
    for way in WAYS:
        where = f"{figure}, {name.split('/')[-1]} | {tp} {kind_name} | {lengths} | {low:.2f} | {way}"
        print(f"| {where} | {_shown(found[way], found[WAYS[0]])} |", flush=True)


def _shown(found: Sequence[Outcome], first_come: Sequence[Outcome]) -> str:
    median, pairs = statistics.median, list(zip(found, first_come, strict=True))
    shares = [one.highest_s / other.highest_s for one, other in pairs]
    tokens = [one.token_ms / other.token_ms for one, other in pairs]
    times = (f"{median(one.token_ms for one in found):.1f}", f"{median(tokens):.2f}") if max(tokens) else ("-", "-")
    columns = (
        f"{median(one.highest_s for one in found):.2f}",
        f"{median(shares):.3f}, {max(shares):.3f}",
        f"{median(one.most_s for one in found):.2f}",
        *times,
        f"{median(one.paged_s for one in found):.1f}",
    )
    return " | ".join(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description="A burst on modelled GPUs, by turns and first come first served.")
    parser.add_argument("--draws", type=int, default=5)
    draws = parser.parse_args().draws
    print(
        "| figure, model | GPUs | lengths | requests/s | way | highest first token, s | of first come, worst | 90%, s |"
        " per token, median, ms | of first come | paging, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        print_case(case, draws)


if __name__ == "__main__":
    main()
