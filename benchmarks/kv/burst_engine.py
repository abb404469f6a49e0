"""A model of one engine under a burst, step by step (:mod:`benchmarks.kv.burst_model`).

Its step times are the simulator's roofline (:mod:`prism.sim.roofline`), who is in the batch is decided by the code
that runs in engines (:mod:`prism.policy.fair`). Prompts and decoding share a step (chunks of 512, as in the paper); a
prompt that is begun goes on before others, as in engines. First come first served lets a request in when its prompt
fits, and retracts the newest when memory ends; by turns, KV that leaves and enters holds up the step, each shard over
its own link (NVLink between devices, or PCIe to host memory), and what was copied out before and has not changed is not
copied again. Turns are as long as in engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prism.policy.fair import (
    ROUND_STEPS,
    FairRequest,
    FairRoom,
    ServiceBook,
    Switch,
    UsualAnswer,
    paging_pays,
    plan_round,
    turn_tokens,
)
from prism.sim.roofline import StepCost

BATCH_TOKENS: Final = 512
_STAYS: Final = 1 << 30
"""Rounds left out, for whose prompt is begun."""


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
        self._prompts: tuple[str, ...] = ()
        """In the order in which they get prompt tokens."""
        self._ended = False
        self._usual = UsualAnswer()
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
                self._usual.note(job.generated)
            self._ended = bool(over)
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
        self._prompts = batch.prefilling
        for job in leaving:
            job.inside, job.clean = False, job.kv_tokens
        for job in entering:
            job.inside = True
        self._turns = any(not job.inside for job in jobs)
        self.paged_s += moved * self._copy_s
        return moved * self._copy_s

    def _turn_tokens(self, jobs: Sequence[BurstJob]) -> int:
        assert self._copy_s is not None
        usual = self._usual.tokens(sum(job.generated for job in jobs))
        trip_s = 2 * self._copy_s * statistics.mean(job.kv_tokens for job in jobs)
        return turn_tokens(usual, trip_s, self._step_s)

    def _view(self, job: BurstJob) -> FairRequest:
        service = self._book.service(job.id, job.decodes, job.generated if job.decodes else job.prefilled)
        kv = max(job.prompt, job.kv_tokens) + ROUND_STEPS
        begun = job.inside and 0 < job.prefilled < job.prompt
        left_out = _STAYS if begun else self._book.left_out(job.id)
        return FairRequest(job.id, service, kv, job.prompt - job.prefilled, job.inside, left_out)

    def _turn_of_prompt(self, job: BurstJob) -> tuple[bool, int]:
        """Sorts: whose prompt is begun goes on, as in engines (SGLang takes one prompt in by chunks at a time); then as
        planned, and in order of arrival."""
        planned = self._prompts.index(job.id) if job.id in self._prompts else len(self._prompts)
        return job.prefilled == 0, planned

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
        for job in sorted((j for j in jobs if j.inside and not j.decodes), key=self._turn_of_prompt):
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
