"""The engine: continuous batching, step by step, as SGLang schedules it.

A step is either a prefill (new prompts, in chunks, before any decoding; :mod:`prism.sim.intake`) or a decode of the
whole batch. When a decode step finds no memory, requests are retracted (fewest tokens first) and prefilled again later.

**Runs.** While the batch does not change, decode steps are taken together as one event: their times have a closed form
(:class:`prism.sim.roofline.Run`), their pages are reserved ahead. Whoever changes something (a new request, a neighbour
that needs pages) cuts the run at the step in progress. ``EngineLimits.fast=False`` takes one step at a time;
``tests/sim/test_fast_path.py`` shows that both give the same decisions and times. The load that a run puts on its
device is that of its batch's first step (the context's growth is left out of it, in both ways).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from prism.core.ids import RequestId
from prism.core.instances import InstanceKey
from prism.policy.kv_ahead import next_steps_tokens
from prism.sim.batch import DecodeBatch
from prism.sim.intake import EngineIntake, EngineLimits
from prism.sim.job import Job
from prism.sim.kv import KvMemory
from prism.sim.queue import EventQueue
from prism.sim.roofline import Run, StepCost
from prism.sim.sharing import Pool
from prism.sim.stint import Stint


class Phase(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Of one step: the pools, the part of its load that each has, and its length in parts of what it takes alone."""

    pools: tuple[Pool, ...]
    shares: tuple[float, ...]
    length: float


class StepPlace(Protocol):
    """Where the steps of an engine run that lacks some of its layers (:class:`prism.sim.pairs.Leaning`)."""

    @property
    def hops_s(self) -> float:
        """What a step takes more."""

    @property
    def ready(self) -> bool:
        """Whether a step can run now."""

    def split(self, prompts: Sequence[int]) -> StepSplit:
        """A step that computes so many tokens of each prompt; none: it decodes."""


class EngineSink(Protocol):
    """Who owns engines and hears of their progress."""

    def first_token(self, engine: Engine, job: Job) -> None:
        """``job`` got its first token of this attempt."""

    def finished(self, engine: Engine, job: Job) -> None:
        """``job`` got its last token and is out of the engine (or ended with ``job.error``)."""

    def stepped(self, engine: Engine) -> None:
        """A step that changed who runs or waits is over and the next one has begun."""


class Engine:
    """One instance of a model. With tensor parallelism it steps on the pools of all its devices at the slowest one's
    rate, and its memory lies on all of them."""

    def __init__(
        self,
        queue: EventQueue,
        key: InstanceKey,
        cost: StepCost,
        kv: KvMemory,
        pools: tuple[Pool, ...],
        limits: EngineLimits,
        sink: EngineSink,
        largest_tokens: Callable[[], int],
    ) -> None:
        """``largest_tokens``: what it could hold now if nobody else held KV memory of its devices."""
        self.key, self.model = key, key.model
        self.kv, self.cost, self.limits, self.pools = kv, cost, limits, pools
        self.batch = DecodeBatch()
        self.intake = EngineIntake(limits, kv, self.batch)
        self.phase = Phase.IDLE
        self.steps = 0
        self.retractions = 0
        self._sink = sink
        self._largest_tokens = largest_tokens
        self._stint = Stint(queue, pools, self._step_end)
        self._prefilling: list[tuple[Job, int]] = []
        self._stepping = False
        self._batch_changed = True
        self._was_idle = False
        self._run, self._run_steps = Run(1.0, 0.0), 0
        self._lean: StepPlace | None = None
        self._leaned = False
        """The last step ran elsewhere, too."""
        self._pause_s = 0.0
        """That the next step takes more."""
        self._held_at_s: float | None = None
        """Since when it makes no decode step; None: it may."""
        self.held_s = 0.0
        """In all, the time now not counted."""
        kv.recall_run = self._cut
        kv.settled_tokens = self.used_tokens_now
        kv.ahead_tokens = self._next_steps_tokens

    # --- questions ---

    @property
    def running(self) -> int:
        """Requests that have memory here."""
        return len(self._with_prompt()) + len(self.batch)

    @property
    def jobs(self) -> int:
        """Requests inside, waiting ones included."""
        return self.running + len(self.intake.waiting)

    def used_tokens_now(self) -> int:
        """KV tokens in use at this moment."""
        if self.phase is not Phase.DECODE or self._run_steps == 1:
            return self.kv.used_tokens
        ahead = self._run_steps - 1 - self._run.done(self._stint.done_s(), self._run_steps)
        return self.kv.used_tokens - len(self.batch.jobs) * ahead if ahead > 0 else self.kv.used_tokens

    def _next_steps_tokens(self) -> int:
        return next_steps_tokens(len(self.batch))

    def made(self) -> dict[RequestId, int]:
        """Tokens after the first one of every answer that decodes, up to the last whole step; of none where its steps
        take more than one device."""
        if self._lean is not None or len(self.pools) > 1:
            return {}
        step = self.batch.step + (self._steps_done() if self.phase is Phase.DECODE else 0)
        return {job.id: job.generated - 1 + step - job.entered_step for job in self.batch.jobs}

    def _with_prompt(self) -> list[Job]:
        """Jobs whose prompt is being prefilled."""
        jobs = [job for job, _ in self._prefilling]
        chunked = self.intake.chunked
        return jobs if chunked is None or chunked in jobs else [*jobs, chunked]

    def _steps_done(self) -> int:
        return self._run.done(self._stint.done_s(), self._run_steps)

    # --- commands ---

    def submit(self, job: Job) -> None:
        """``job`` enters at the next step."""
        self.intake.waiting.append(job)
        self._wake()

    def lean_on(self, place: StepPlace | None, pause_s: float = 0.0) -> None:
        """From the next step on steps run at ``place``, which says before each one where that is (None: on its own
        devices); the first one takes ``pause_s`` more."""
        self._lean, self._pause_s = place, self._pause_s + pause_s
        self._wake()

    def hold(self, now_s: float) -> None:
        """After the step in progress it decodes no more until :meth:`go_on`; who comes is prefilled all the same."""
        if self._held_at_s is None:
            self._held_at_s = now_s
            self._cut()

    def go_on(self, now_s: float) -> None:
        """It decodes again."""
        if self._held_at_s is not None:
            self.held_s += now_s - self._held_at_s
            self._held_at_s = None
            self._wake()

    def stop(self) -> list[Job]:
        """The engine ends now and gives its memory back; returns the unfinished jobs with their tokens counted."""
        if self.phase is Phase.DECODE:
            self.batch.advance(self._steps_done())
        jobs = list(self.batch.jobs)
        for job in jobs:
            self.batch.remove(job)
        jobs += [*self._with_prompt(), *self.intake.waiting]
        for job in jobs:
            job.held_blocks, job.kv_tokens = [], 0
        self.intake.waiting.clear()
        self._prefilling, self.intake.chunked = [], None
        self.phase = Phase.IDLE
        self._stint.rest()
        self.kv.close()
        return jobs

    # --- steps ---

    def _wake(self) -> None:
        if self.phase is Phase.IDLE:
            if not self._stepping:
                self._next()
        elif self.phase is Phase.DECODE:
            self._cut()

    def _fed(self) -> None:
        """Memory came back on a device: those who wait for it may try again."""
        if self.intake.hungry:
            self.intake.hungry = False
            self._wake()

    def _cut(self) -> None:
        """End the run of decode steps after the one in progress."""
        if self.phase is not Phase.DECODE or self._run_steps == 1:
            return
        steps = min(self._run_steps, self._steps_done() + 1)
        if steps < self._run_steps:
            ahead = (self._run_steps - steps) * len(self.batch)
            self._run_steps = steps
            self._stint.shorten(self._run.total_s(steps))
            self.kv.shrink(ahead, quiet=True)

    def _step_end(self, _: object) -> None:
        self._stepping = True
        phase, self.phase = self.phase, Phase.IDLE
        changed = self._prefilled() if phase is Phase.PREFILL else self._decoded()
        self._stepping = False
        self._next()
        if changed:
            self._sink.stepped(self)

    def _next(self) -> None:
        """Begin the next step, or rest."""
        if self._lean is not None and not self._lean.ready:
            self._stint.rest()
            return
        if self._held_at_s is not None and self.batch.jobs:
            if not self._fill():
                self._stint.rest()
        elif not self._fill() and (not self.batch.jobs or not self._begin_decode()):
            self.intake.hungry = False  # whoever was retracted gave memory back before anybody waited for it
            if not self._fill():
                self._rest()
        if self.intake.hungry:
            self.kv.wait(self._fed)

    def _take_place(self, prompts: Sequence[int]) -> float:
        """Go where the step runs that begins; its length in parts of what it takes alone."""
        if self._lean is None:
            if self._leaned:
                self._stint.use(self.pools)
                self._leaned = False
            return 1.0
        self._leaned = True
        split = self._lean.split(prompts)
        self._stint.use(split.pools, split.shares)
        return split.length

    def _slower_s(self) -> float:
        """What the step that begins takes more than its own work."""
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s + (self._lean.hops_s if self._lean is not None else 0.0)

    def _fill(self) -> bool:
        """Begin a prefill step if anybody may enter."""
        self._prefilling = self.intake.fill()
        if self._prefilling:
            self._begin_prefill()
        return bool(self._prefilling)

    def _rest(self) -> None:
        self.phase = Phase.IDLE
        self.intake.reset_ratio()
        self._stint.rest()
        waiting = self.intake.waiting
        if not waiting:
            self.kv.rest()
        if waiting and waiting[0].prompt_tokens + waiting[0].generated >= self._largest_tokens():
            self._refuse(waiting.popleft())

    def _refuse(self, job: Job) -> None:
        """End ``job``: it could not run even if nothing else did."""
        job.error = "too_large"
        self.intake.hungry = False
        self._stepping = True
        self._sink.finished(self, job)
        self._stepping = False
        self._next()

    def _begin_prefill(self) -> None:
        tokens = context = 0
        pairs = 0.0
        for job, chunk in self._prefilling:
            tokens += chunk
            context += job.computed_tokens
            pairs += chunk * (job.computed_tokens + chunk / 2)
        work_s, load = self.cost.prefill(tokens, pairs, context, len(self._prefilling))
        self.kv.note_ahead(self.intake.ahead_tokens(self._prefilling))
        self.steps += 1
        self.phase = Phase.PREFILL
        work_s *= self._take_place([chunk for _, chunk in self._prefilling])
        self._stint.begin(work_s + self._slower_s(), load)

    def _begin_decode(self) -> bool:
        """False: everybody was retracted, nothing can run."""
        while not self.kv.grow(len(self.batch)):
            self._retract(self.batch.victim())
            if not self.batch.jobs:
                return False
        size = len(self.batch)
        steps = self.batch.steps_to_finish() if self.limits.fast and self._lean is None else 1
        if steps > 1:
            steps = 1 + max(0, min(steps - 1, self.kv.room_tokens() // (2 * size)))
            self.kv.grow(size * (steps - 1))
        run, load = self.cost.decode(size, self.batch.context_tokens + size, self._was_idle)
        self._was_idle = False
        self._take_place(())
        if (more_s := self._slower_s()) > 0.0:
            run = Run(run.first_s, run.growth_s, run.lead_s + more_s)
        if not self._batch_changed and self._stint.load is not None:
            load = self._stint.load
        self._batch_changed = False
        self._run, self._run_steps = run, steps
        self.phase = Phase.DECODE
        self._stint.begin(run.total_s(steps), load)
        return True

    def _decoded(self) -> bool:
        self.kv.note_ahead(self._next_steps_tokens())
        self.steps += self._run_steps
        self.batch.advance(self._run_steps)
        self.intake.decoded(self._run_steps)
        finished = self.batch.pop_finished()
        for job in finished:
            self._leave(job)
            self._sink.finished(self, job)
        return bool(finished)

    def _prefilled(self) -> bool:
        items, self._prefilling = self._prefilling, []
        self._was_idle = self._was_idle or not len(self.batch)
        for job, chunk in items:
            job.computed_tokens += chunk
            job.left_tokens -= chunk
            if job.left_tokens:
                self.intake.chunked = job
                continue
            if job is self.intake.chunked:
                self.intake.chunked = None
            self._share_blocks(job)
            job.generated += 1
            self._batch_changed = True
            if job.generated < job.output_tokens:
                self.batch.add(job, job.computed_tokens)
                self._sink.first_token(self, job)
            else:
                self._sink.first_token(self, job)
                self._leave(job)
                self._sink.finished(self, job)
        return True

    # --- leaving ---

    def _share_blocks(self, job: Job) -> None:
        """Put the blocks that ``job`` has computed into the cache."""
        fresh = job.blocks[len(job.held_blocks) :]
        if fresh:
            added = self.kv.cache.insert(fresh)
            job.held_blocks += added
            job.kv_tokens -= len(added) * self.kv.cache.block_tokens

    def _leave(self, job: Job) -> None:
        """Give back the memory of a job that is out of the batch."""
        if job.held_blocks:
            self.kv.to_cache(self.kv.cache.release(job.held_blocks))
            job.held_blocks = []
        self.kv.shrink(job.kv_tokens)
        job.kv_tokens = 0
        self.intake.hungry = False
        self._batch_changed = True

    def _retract(self, job: Job) -> None:
        self.retractions += 1
        self.batch.remove(job)
        self._leave(job)
        self.intake.retracted(job)
