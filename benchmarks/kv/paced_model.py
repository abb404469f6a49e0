"""A model of the engine of :mod:`benchmarks.kv.paced_burst`, for many draws: what would a faster link give it?

    python -m benchmarks.kv.paced_model [--draws 12] [--first 200] [--rates 0.55 0.6]

Steps of prompts and of decoding are apart, as SGLang's are, and take what the devices declare; who is in is decided by
:mod:`prism.policy.fair` as in engines (:mod:`sglang_patches.fair`); KV that leaves and comes back takes its link, one
copy after the other each way, beside the steps of others. First come first served reserves as SGLang does. *Free
copies*: a link that takes no time, the bound of what any link gives this policy. *No memory limit*: room for everybody,
so that nobody leaves. Below, links to host memory that are slower, or as much more KV to a token: from where on is a
peer ten times as fast better?

All is drawn from ShareGPT's recorded lengths; the same each time. Result: docs/results/aqua.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.kv.burst import HOST_BYTES_S, KV_PAGES, PEER_TIMES, PROMPT_SHARE, arrivals
from benchmarks.kv.paced_burst import declared_pace
from prism.policy.fair import (
    ROUND_STEPS,
    FairRequest,
    FairRoom,
    ReturnSteps,
    ServiceBook,
    Switch,
    UsualAnswer,
    expected_left,
    paging_pays,
    plan_round,
    turn_tokens,
)
from prism.trace.lengths import length_table

TOKEN_BYTES: Final = 4096
MEMORY_TOKENS: Final = KV_PAGES * (2 << 20) // TOKEN_BYTES
UNLIMITED_TOKENS: Final = 1 << 40
STEP_S: Final = 0.004
"""What an engine takes of a step beside its layers."""
LOOKAHEAD: Final = 16
PIECE_S: Final = 1e-4
CHUNK_TOKENS: Final = 8192
PACE: Final = declared_pace()
SLOWER: Final = (1, 4, 10, 20)
"""Times as slow a link to host memory, or as much KV to a token over the same."""


@dataclass(slots=True)
class PacedJob:
    """One request."""

    id: str
    at_s: float
    prompt: int
    answer: int
    generated: int = 0
    begun: bool = False
    inside: bool = False
    stored: int = 0
    """Tokens whose KV is outside, too."""
    stored_s: float = 0.0
    """When it is there."""
    ready_s: float = -1.0
    """When its KV is back; -1: nobody brings it."""
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def kv_tokens(self) -> int:
        return self.prompt + self.generated


class PacedEngine:
    """One engine. ``copy_s``: of a token's KV, one way; None: first come first served."""

    def __init__(self, copy_s: float | None, memory_tokens: int = MEMORY_TOKENS) -> None:
        self._copy_s, self._memory = copy_s, memory_tokens
        self._book, self._usual, self._returns = ServiceBook(), UsualAnswer(), ReturnSteps()
        self._steps, self._step_s, self._reserved = 0, 0.034, 0.7
        self._present: set[str] = set()
        self._chosen: set[str] = set()
        self._outside: set[str] = set()
        self._pays = True
        self._links = {"out": 0.0, "in": 0.0}
        """When they are free."""
        self.paged_tokens = 0

    def run(self, coming: Sequence[PacedJob]) -> list[PacedJob]:
        """Everything to its end. ``coming`` by time."""
        now_s, left, jobs, done = 0.0, list(coming), list[PacedJob](), list[PacedJob]()
        while left or jobs:
            now_s = max(now_s, left[0].at_s) if not jobs else now_s
            while left and left[0].at_s <= now_s:
                jobs.append(left.pop(0))
            self._reserved = max(0.098, self._reserved - 0.001)
            entering = self._first_come(jobs) if self._copy_s is None else self._turn(jobs, now_s)
            took_s = self._step(jobs, entering)
            now_s += took_s
            self._step_s += (took_s - self._step_s) * 0.25
            for job in entering:
                job.first_s = job.first_s or now_s
            over = [job for job in jobs if job.generated >= job.answer]
            for job in over:
                job.end_s = now_s
                self._usual.note(job.generated)
            done += over
            jobs = [job for job in jobs if job.generated < job.answer]
        return done

    def _step(self, jobs: Sequence[PacedJob], entering: Sequence[PacedJob]) -> float:
        running = [job for job in jobs if job.inside]
        if entering:
            tokens = sum(1 if job.begun else job.prompt for job in entering)
            for job in entering:
                job.inside = job.begun = True
                job.generated += 1
            return STEP_S + PACE.layer_s + tokens * PACE.prefill_token_s
        if not running:
            return 0.001  # a copy is awaited
        held = sum(job.kv_tokens for job in running)
        for job in running:
            job.generated += 1
        return STEP_S + PACE.layer_s + len(running) * PACE.decode_sequence_s + held * PACE.decode_kv_token_s

    def _first_come(self, jobs: Sequence[PacedJob]) -> list[PacedJob]:
        """As SGLang: with room for a part of all answers, which is less the longer none had to make room."""
        running = [job for job in jobs if job.inside]
        held = sum(job.kv_tokens for job in running)
        while held + len(running) > self._memory and len(running) > 1:
            last = min(running, key=lambda job: (job.generated, -job.prompt))
            last.inside = last.begun = False
            running.remove(last)
            held -= last.kv_tokens
            self._reserved = min(1.0, sum(j.generated + 100 for j in running) / sum(j.answer for j in running))
        promised = sum(self._reserved * (job.answer - job.generated) for job in running)
        entering: list[PacedJob] = []
        for job in (job for job in jobs if not job.inside):
            left = job.answer - job.generated
            if held + promised + job.kv_tokens + 1 + left > self._memory:
                break
            entering.append(job)
            held, promised = held + job.kv_tokens + 1, promised + left
        return entering

    def _turn(self, jobs: Sequence[PacedJob], now_s: float) -> list[PacedJob]:
        ids, running = {job.id for job in jobs}, [job for job in jobs if job.inside]
        ended, came = bool(self._present - ids), bool(ids - self._present)
        self._present, self._steps = ids, self._steps + bool(running)
        if self._steps >= ROUND_STEPS or ended or not running or (came and not self._outside):
            self._round(jobs, now_s)
        elif self._outside:
            self._outside |= {job.id for job in jobs if not job.inside and job.id not in self._chosen}
        waiting = [job for job in jobs if not job.inside and job.id not in self._outside]
        there = self._bring(waiting, self._memory - sum(job.kv_tokens for job in jobs if job.inside), now_s)
        returning = sum(job.begun for job in there)
        running_now = sum(job.inside for job in jobs)
        if returning and not self._returns.due(returning, running_now, len(there) > returning):
            there = [job for job in there if not job.begun]
        elif not returning:
            self._returns.due(0, running_now, bool(there))
        return there

    def _bring(self, waiting: Sequence[PacedJob], room_tokens: int, now_s: float) -> list[PacedJob]:
        """Who of ``waiting`` could begin or go on now; copies begin for those whose KV is outside."""
        assert self._copy_s is not None
        there: list[PacedJob] = []
        for job in waiting:
            left = job.answer - job.generated
            if job.kv_tokens + (LOOKAHEAD if self._pays else left) > room_tokens:
                if not self._pays:
                    break
                continue
            room_tokens -= job.kv_tokens + LOOKAHEAD
            if job.begun and job.ready_s < 0:
                start_s = max(now_s, self._links["in"], job.stored_s)
                job.ready_s = self._links["in"] = start_s + job.kv_tokens * self._copy_s
                self.paged_tokens += job.kv_tokens
            if not job.begun or job.ready_s <= now_s:
                there.append(job)
        return there

    def _round(self, jobs: Sequence[PacedJob], now_s: float) -> None:
        assert self._copy_s is not None
        self._steps = 0
        self._book.enter([(job.id, job.begun, job.generated) for job in jobs])
        usual = self._usual.tokens(sum(job.generated for job in jobs))
        turn = turn_tokens(usual, self._trip_s(sum(job.kv_tokens for job in jobs) // max(1, len(jobs))), self._step_s)
        batch = plan_round([self._view(job) for job in jobs], FairRoom(self._memory, CHUNK_TOKENS, 256, turn))
        running = [job for job in jobs if job.inside]
        leaving = [job for job in running if job.id not in batch.members]
        entering = sum(not job.inside and job.id in batch.members for job in jobs)
        if leaving and entering:
            wait_s = self._step_s * min(expected_left(job.generated, job.answer, usual) for job in running)
            copy_s = sum(self._trip_s(job.kv_tokens) for job in leaving)
            self._pays = paging_pays(Switch(copy_s, len(leaving), entering, wait_s))
        if leaving and not self._pays:
            self._chosen, self._outside = set(self._present), set()
            return
        self._book.note_round([job.id for job in jobs], batch)
        self._chosen = set(batch.members)
        for job in leaving:
            start_s = max(now_s, self._links["out"])
            job.stored_s = self._links["out"] = start_s + (job.kv_tokens - job.stored) * self._copy_s
            job.inside, job.stored, job.ready_s = False, job.kv_tokens, -1.0
        self._outside = {job.id for job in jobs if not job.inside} - self._chosen

    def _trip_s(self, tokens: int) -> float:
        assert self._copy_s is not None
        return 2 * (tokens * self._copy_s + tokens / 64 * PIECE_S * (self._copy_s > 0))

    def _view(self, job: PacedJob) -> FairRequest:
        service = self._book.service(job.id, job.begun, job.generated)
        left_out = self._book.left_out(job.id)
        kv, prompt = job.kv_tokens + LOOKAHEAD, 0 if job.begun else job.prompt
        return FairRequest(job.id, service, kv, prompt, job.inside, left_out)


def jobs_of(rate: float, seed: int, before: int = 10, burst_s: float = 60.0) -> list[PacedJob]:
    rng, table = np.random.default_rng(seed), length_table("sharegpt")
    made = []
    for i, at_s in enumerate(arrivals(rate, before, burst_s)):
        prompt, answer = table.draw(rng)
        made.append(PacedJob(str(i), at_s, max(1, prompt // PROMPT_SHARE), answer))
    return made


def outcome(copy_s: float | None, rate: float, seed: int, memory_tokens: int = MEMORY_TOKENS) -> tuple[float, ...]:
    """Highest and 90% first token, s; time per token, median and mean, ms; when nineteen of twenty have ended, s after
    they came; tokens paged in."""
    engine = PacedEngine(copy_s, memory_tokens)
    done = engine.run(jobs_of(rate, seed))
    waits = sorted(job.first_s - job.at_s for job in done)
    each_ms = [1000 * (job.end_s - job.first_s) / max(1, job.answer - 1) for job in done]
    whole = sorted(job.end_s - job.at_s for job in done)
    at = int(0.9 * len(waits)), int(0.95 * len(whole))
    return (
        *(waits[-1], waits[at[0]], statistics.median(each_ms), statistics.mean(each_ms), whole[at[1]]),
        engine.paged_tokens,
    )


def row(name: str, found: Sequence[tuple[float, ...]], better: str = "") -> str:
    medians = [statistics.median(each) for each in zip(*found, strict=True)]
    shown = (f"{medians[0]:.2f}", f"{medians[1]:.2f}", *(f"{x:.1f}" for x in medians[2:5]), f"{medians[5]:,.0f}")
    return f"| {name} | {' | '.join(shown)} | {better} |"


def better(one: Sequence[tuple[float, ...]], other: Sequence[tuple[float, ...]]) -> str:
    """In how many draws ``one`` has the lower highest first token, the lower median and mean time per token."""
    wins = [sum(a[i] < b[i] for a, b in zip(one, other, strict=True)) for i in (0, 2, 3)]
    ties = [sum(a[i] == b[i] for a, b in zip(one, other, strict=True)) for i in (0, 2, 3)]
    return ", ".join(f"{w} ({t} alike)" if t else str(w) for w, t in zip(wins, ties, strict=True)) + f" of {len(one)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A burst on a modelled paced engine, by link.")
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--first", type=int, default=200)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.55, 0.6])
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.draws)
    host_s = TOKEN_BYTES / HOST_BYTES_S
    print(
        "| rate, way | highest, s | 90%, s | per token, median, ms | mean | 95% ended, s | paged | better than host |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rate in options.rates:
        print(row(f"{rate}/s, first come", [outcome(None, rate, s) for s in seeds]), flush=True)
        print(row(f"{rate}/s, no memory limit", [outcome(0.0, rate, s, UNLIMITED_TOKENS) for s in seeds]), flush=True)
        for slower in SLOWER:
            ways = {"host": host_s * slower, "peer": host_s * slower / PEER_TIMES, "free copies": 0.0}
            found = {way: [outcome(copy_s, rate, s) for s in seeds] for way, copy_s in ways.items()}
            for way, each in found.items():
                name = f"{rate}/s, {way}, {1e6 * ways[way]:.1f} us a token"
                print(row(name, each, "" if way == "host" else better(each, found["host"])), flush=True)


if __name__ == "__main__":
    main()
