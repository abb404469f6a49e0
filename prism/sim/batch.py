"""The decode batch of an engine: who is in it, who finishes next, how many tokens it holds.

Nothing is touched per step: a job stores the step at which it joined, so that a run of any length costs the same.
"""

from __future__ import annotations

from heapq import heappop, heappush

from prism.sim.job import Job


class DecodeBatch:
    """``step`` counts the decode steps of the engine; ``context_tokens`` are the KV tokens of all jobs at it."""

    __slots__ = ("_finishing", "_tickets", "context_tokens", "jobs", "remaining_tokens", "step")

    def __init__(self) -> None:
        self.step = 0
        self.jobs: dict[Job, None] = {}
        self.context_tokens = 0
        self.remaining_tokens = 0
        """Tokens that all jobs together still have to make."""
        self._finishing: list[tuple[int, int, Job]] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job, context_tokens: int) -> None:
        """``job`` decodes from the next step on, holding ``context_tokens`` now."""
        self._tickets += 1
        job.ticket, job.entered_step = self._tickets, self.step
        self.jobs[job] = None
        self.context_tokens += context_tokens
        self.remaining_tokens += job.remaining
        heappush(self._finishing, (self.step + job.remaining, job.ticket, job))

    def steps_to_finish(self) -> int:
        """Steps until the first job has its last token. The batch must not be empty."""
        finishing = self._finishing
        while finishing[0][2].ticket != finishing[0][1]:
            heappop(finishing)
        return finishing[0][0] - self.step

    def advance(self, steps: int) -> None:
        """Every job has made ``steps`` more tokens."""
        made = steps * len(self.jobs)
        self.step += steps
        self.context_tokens += made
        self.remaining_tokens -= made

    def pop_finished(self) -> list[Job]:
        """Take out the jobs that have their last token, in the order in which they joined."""
        finished: list[Job] = []
        finishing = self._finishing
        while finishing and finishing[0][0] <= self.step:
            _, ticket, job = heappop(finishing)
            if job.ticket == ticket:
                self._leave(job)
                finished.append(job)
        return finished

    def remove(self, job: Job) -> None:
        """Take ``job`` out; its heap entry dies with its ticket."""
        self.remaining_tokens -= job.remaining - (self.step - job.entered_step)
        self._leave(job)

    def _leave(self, job: Job) -> None:
        made = self.step - job.entered_step
        job.generated += made
        job.kv_tokens += made
        job.computed_tokens += made
        self.context_tokens -= job.computed_tokens
        job.ticket = 0
        del self.jobs[job]

    def victim(self) -> Job:
        """Whom to retract: the fewest tokens made, then the longest prompt (SGLang's order), then the last to join."""
        step = self.step
        return min(self.jobs, key=lambda j: (j.generated + step - j.entered_step, -j.prompt_tokens, -j.ticket))
