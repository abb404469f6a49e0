"""The same burst on GPUs that are not here: AQUA's Figures 8 and 13 on modelled H100s and A100s.

    python -m benchmarks.kv.burst_model

One engine, step by step: its step times are the simulator's roofline (:mod:`prism.sim.roofline`), who is in the batch
is decided by the code that runs in engines (:mod:`prism.policy.fair`), lengths are drawn from recorded ones. Prompts
and decoding share a step (chunks of 512, as in the paper). First come first served lets a request in when its prompt
fits, and retracts the newest when memory ends; by turns, KV that leaves and enters holds up the step, each shard over
its own link (NVLink between devices, or PCIe to host memory), and what was copied out before and has not changed is not
copied again. Turns are as long as in engines.
The stable rate is the largest, by halving, at which first come first served costs requests a second each
on average beyond what they take alone; then 25 requests at that rate and a minute at ``burst`` times.

Goal: highest first-token time over the peer 1/20 of first come's at 1.2 times the time per token. Result:
docs/results/aqua.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from prism.policy.fair import (
    ROUND_STEPS,
    FairRequest,
    FairRoom,
    ServiceBook,
    Switch,
    paging_pays,
    plan_round,
    turn_tokens,
)
from prism.sim.gpus import gpu
from prism.sim.machines import USABLE
from prism.sim.models import known_spec
from prism.sim.roofline import StepCost, step_cost
from prism.trace.lengths import length_table

BATCH_TOKENS: Final = 512
WAYS: Final = ("first come", "fair, host", "fair, peer")
CASES: Final = (
    ("Figure 8", "meta-llama/Llama-3.3-70B-Instruct", 2, "H100", "sharegpt", 2),
    ("Figure 8", "meta-llama/Llama-3.3-70B-Instruct", 2, "A100", "sharegpt", 2),
    ("Figure 13", "Qwen/Qwen2.5-32B-Instruct", 1, "A100", "arxiv", 3),
)


@dataclass(slots=True)
class BurstJob:
    """One request."""

    id: str
    at_s: float
    prompt: int
    answer: int
    prefilled: int = 0
    generated: int = 0
    inside: bool = False
    clean: int = 0
    """Tokens whose KV is outside already."""
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def kv_tokens(self) -> int:
        return self.prefilled + self.generated

    @property
    def decodes(self) -> bool:
        return self.prefilled >= self.prompt


class BurstEngine:
    """One engine of ``tp`` devices."""

    def __init__(self, cost: StepCost, memory_tokens: int, copy_s: float | None) -> None:
        """``copy_s``: of a token's KV, one way; None: first come first served."""
        self._cost, self._memory, self._copy_s = cost, memory_tokens, copy_s
        self._book = ServiceBook()
        self._round = 0
        self._step_s = 0.03
        self._turns, self._pays = False, True
        self._ended = False
        self._answers: list[int] = []
        self.paged_s = 0.0

    def run(self, coming: Sequence[BurstJob]) -> list[BurstJob]:
        """Everything to its end. ``coming`` by time."""
        now_s, left, jobs, done = 0.0, list(coming), list[BurstJob](), list[BurstJob]()
        while left or jobs:
            if not jobs:
                now_s = max(now_s, left[0].at_s)
            while left and left[0].at_s <= now_s:
                jobs.append(left.pop(0))
            now_s += self._choose(jobs)
            took_s = self._step(jobs, now_s)
            now_s, self._step_s = now_s + took_s, took_s
            over = [job for job in jobs if job.generated >= job.answer]
            for job in over:
                job.end_s = now_s
            self._ended = bool(over)
            self._answers += [job.generated for job in over]
            done += over
            jobs = [job for job in jobs if job.generated < job.answer]
        return done

    def _choose(self, jobs: list[BurstJob]) -> float:
        """Who is in; returns how long copies hold up the step."""
        if self._copy_s is None:
            self._first_come(jobs)
            return 0.0
        self._round -= 1
        if self._round > 0 and not self._ended and all(job.inside for job in jobs):
            return 0.0
        if self._round > 0 and self._turns and not self._ended:
            return 0.0
        self._round = ROUND_STEPS
        self._book.enter([(j.id, j.decodes, j.generated if j.decodes else j.prefilled) for j in jobs])
        views = [self._view(job) for job in jobs]
        batch = plan_round(views, FairRoom(self._memory, BATCH_TOKENS, 256, self._turn_tokens(jobs)))
        leaving = [j for j in jobs if j.inside and j.id not in batch.members]
        entering = [j for j in jobs if not j.inside and j.id in batch.members]
        moved = sum(j.kv_tokens - j.clean for j in leaving) + sum(j.kv_tokens for j in entering)
        left = min((j.answer - j.generated for j in jobs if j.inside), default=0)
        switch = Switch(moved * self._copy_s, len(jobs), len(entering), left * self._step_s)
        if leaving and entering:
            self._pays = paging_pays(switch)
        if leaving and not self._pays:
            self._turns = False
            self._first_come(jobs)
            return 0.0
        self._book.note_round([j.id for j in jobs], batch)
        for job in leaving:
            job.inside, job.clean = False, job.kv_tokens
        for job in entering:
            job.inside = True
        self._turns = any(not job.inside for job in jobs)
        self.paged_s += moved * self._copy_s
        return moved * self._copy_s

    def _turn_tokens(self, jobs: Sequence[BurstJob]) -> int:
        assert self._copy_s is not None
        usual = statistics.mean(self._answers) if self._answers else 0.0
        trip_s = 2 * self._copy_s * statistics.mean(job.kv_tokens for job in jobs)
        return turn_tokens(usual, trip_s, self._step_s)

    def _view(self, job: BurstJob) -> FairRequest:
        service = self._book.service(job.id, job.decodes, job.generated if job.decodes else job.prefilled)
        kv = max(job.prompt, job.kv_tokens) + ROUND_STEPS
        return FairRequest(job.id, service, kv, job.prompt - job.prefilled, job.inside, self._book.left_out(job.id))

    def _first_come(self, jobs: list[BurstJob]) -> None:
        held = sum(max(j.prompt, j.kv_tokens) + 1 for j in jobs if j.inside)
        for job in jobs:
            if not job.inside:
                need = job.prompt + job.generated + 1
                if held + need > self._memory:
                    break
                job.inside, held = True, held + need
        for job in reversed(jobs):
            if held > self._memory and job.inside:
                job.inside, held = False, held - max(job.prompt, job.kv_tokens) - 1
                job.prefilled = job.clean = 0

    def _step(self, jobs: list[BurstJob], now_s: float) -> float:
        decoding = [j for j in jobs if j.inside and j.decodes]
        room, prompts, pairs = max(1, BATCH_TOKENS - len(decoding)), list[tuple[BurstJob, int]](), 0.0
        for job in sorted((j for j in jobs if j.inside and not j.decodes), key=lambda j: j.prefilled):
            if (tokens := min(room, job.prompt - job.prefilled)) > 0:
                prompts.append((job, tokens))
                pairs += tokens * (job.prefilled + tokens / 2)
                room -= tokens
        context = sum(j.kv_tokens for j in decoding)
        if prompts:
            tokens = sum(t for _, t in prompts) + len(decoding)
            took_s, _ = self._cost.prefill(tokens, pairs, context, len(decoding) + len(prompts))
        else:
            took_s = self._cost.decode(max(1, len(decoding)), context)[0].first_s
        for job, tokens in prompts:
            job.prefilled += tokens
        for job in [*decoding, *(j for j, _ in prompts if j.decodes)]:
            job.generated += 1
            job.first_s = job.first_s or now_s + took_s
        return took_s


def jobs_at(times_s: Sequence[float], lengths: str, seed: int) -> list[BurstJob]:
    rng = np.random.default_rng(seed)
    return [BurstJob(str(i), at_s, *length_table(lengths).draw(rng)) for i, at_s in enumerate(times_s)]


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


def main() -> None:
    print(
        "| figure, model | GPUs | requests/s | way | highest first token, s | 90% | per token, median, ms | paging, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for figure, name, tp, kind_name, lengths, burst in CASES:
        kind, model = gpu(kind_name), known_spec(name, name, 1.0, 0.1, tp)
        room_bytes = tp * (kind.memory_bytes * USABLE - kind.process_bytes) - model.weight_bytes
        memory, cost = int(room_bytes / model.shape.kv_bytes_per_token), step_cost(model, kind)
        shard_bytes = model.shape.kv_bytes_per_token / tp
        rates = {"fair, host": kind.pcie_bytes_per_s * kind.pcie_efficiency, "fair, peer": kind.nvlink_bytes_per_s}
        low = stable_rate(cost, memory, lengths)
        times_s = [i / low for i in range(25)]
        times_s += [times_s[-1] + (i + 1) / (burst * low) for i in range(int(60 * burst * low))]
        for way in WAYS:
            engine = BurstEngine(cost, memory, shard_bytes / rates[way] if way in rates else None)
            done = engine.run(jobs_at(times_s, lengths, 5))
            each = statistics.median(1000 * (j.end_s - j.first_s) / max(1, j.generated - 1) for j in done)
            waits = first_tokens(done)
            shown = f"{waits[-1]:.2f} | {waits[int(0.9 * len(waits))]:.2f} | {each:.1f} | {engine.paged_s:.1f}"
            print(f"| {figure}, {name.split('/')[-1]} | {tp} {kind_name} | {low:.2f} | {way} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
