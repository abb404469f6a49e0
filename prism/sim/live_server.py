"""One instance in a simulated scale-out: continuous batching, step by step, from its first layers to its release."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from prism.policy.live.choice import Receiver, paired_rate, sharing
from prism.policy.moving import Leg, choose_way
from prism.sim.live_arrivals import LiveLinks
from prism.sim.roofline import StepCost

PREFILL_TOKENS: Final = 4096
"""Prompts of one step."""
_SLICES: Final = 16


@dataclass(slots=True)
class LiveJob:
    """One request."""

    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    made: int = 0
    first_s: float | None = None
    end_s: float | None = None

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.made


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Of one instance."""

    batch: int
    kv_tokens: int
    kv_token_bytes: int


class PipelineRoom:
    """Who still serves together: the members of one pipeline that are not complete."""

    __slots__ = ("alone_s", "ready_s")

    def __init__(self, ready_s: float, alone_s: list[float]) -> None:
        self.ready_s, self.alone_s = ready_s, alone_s

    def leaders(self, now_s: float) -> int:
        return sum(at_s > now_s for at_s in self.alone_s)


class LiveServer:
    """``room``: the pipeline it is in; ``paired``: it serves beside an overloaded one while it loads. Neither: it
    serves when it has everything. Times are the world's; ``receiver`` counts from ``began_s``."""

    def __init__(
        self,
        name: str,
        began_s: float,
        receiver: Receiver,
        cost: StepCost,
        limits: ServerLimits,
        links: LiveLinks,
        room: PipelineRoom | None = None,
        paired: bool = False,
    ) -> None:
        self.name, self.began_s = name, began_s
        self._receiver, self._cost, self._limits, self._links = receiver, cost, limits, links
        self._room, self.paired = room, paired
        self.alone_s = began_s + receiver.alone_s
        self.running: list[LiveJob] = []
        self.busy_until_s = 0.0
        self.pause_s = 0.0
        """Of its switch."""
        self._switched = room is None
        self._prefilled: list[LiveJob] = []

    @property
    def first_s(self) -> float:
        """From when it may serve something."""
        if self._room is not None:
            return min(self._room.ready_s, self.alone_s)
        return self.began_s + self._receiver.first_s if self.paired else self.alone_s

    def speed(self, now_s: float) -> float:
        """In parts of a whole instance; 0: it serves nothing yet."""
        if now_s >= self.alone_s:
            return 1.0
        if now_s < self.first_s:
            return 0.0
        if self._room is not None:
            return sharing(self._room.leaders(now_s), self._links.stage_wait)
        took_s = max(self.alone_s - self.first_s, 1e-9)
        return paired_rate((now_s - self.first_s) / took_s)

    def begin_step(self, queue: deque[LiveJob], now_s: float, most: int) -> float | None:
        """Takes from ``queue`` what fits, ``most`` requests at most, and begins a step; when that ends, None with
        nothing to do."""
        if self.speed(now_s) <= 0.0:
            return None
        entering = self._enter(queue, most)
        if entering:
            tokens = sum(job.kv_tokens for job in entering)
            pairs = sum(job.kv_tokens**2 for job in entering) / 2
            step_s, _ = self._cost.prefill(tokens, pairs, 0, len(entering))
        elif self.running:
            step_s = self._cost.decode(len(self.running), self.kv_tokens)[0].first_s
        else:
            return None
        self._prefilled = entering
        hops_s = 0.0 if self._room is None or now_s >= self.alone_s else self._room.leaders(now_s) * self._links.hop_s
        self.busy_until_s = self._done_s(now_s + hops_s + self._switch_s(now_s), step_s)
        return self.busy_until_s

    def _done_s(self, at_s: float, work_s: float) -> float:
        """When work that takes a whole instance ``work_s`` is done, begun at ``at_s``: speeds change on the way."""
        for end_s in self._changes_s(at_s):
            speed = self.speed((at_s + end_s) / 2)
            if speed * (end_s - at_s) >= work_s:
                return at_s + work_s / speed
            work_s -= speed * (end_s - at_s)
            at_s = end_s
        return at_s + work_s

    def _changes_s(self, now_s: float) -> list[float]:
        """Times at which the speed changes, until it has everything; a pair's grows all the time."""
        if now_s >= self.alone_s:
            return []
        if self._room is not None:
            return sorted({at_s for at_s in (*self._room.alone_s, self.alone_s) if now_s < at_s <= self.alone_s})
        left_s = self.alone_s - now_s
        return [now_s + left_s * (i + 1) / _SLICES for i in range(_SLICES)]

    def end_step(self, now_s: float) -> tuple[int, list[LiveJob]]:
        """Tokens that were made, and requests that are done."""
        batch = self._prefilled or self.running
        if self._prefilled:
            self.running += self._prefilled
        for job in batch:
            job.made += 1
            if job.first_s is None:
                job.first_s = now_s
        done = [job for job in batch if job.made >= job.answer_tokens]
        for job in done:
            job.end_s = now_s
        if done:
            self.running = [job for job in self.running if job.end_s is None]
        self._prefilled = []
        return len(batch), done

    @property
    def kv_tokens(self) -> int:
        return sum(job.kv_tokens for job in self.running)

    def _enter(self, queue: deque[LiveJob], most_jobs: int) -> list[LiveJob]:
        entering: list[LiveJob] = []
        kv_tokens, tokens = sum(job.prompt_tokens + job.answer_tokens for job in self.running), 0
        while queue and len(entering) < min(most_jobs, self._limits.batch - len(self.running)):
            job = queue[0]
            most = job.prompt_tokens + job.answer_tokens
            if kv_tokens + most > self._limits.kv_tokens or (entering and tokens + job.kv_tokens > PREFILL_TOKENS):
                break
            kv_tokens, tokens = kv_tokens + most, tokens + job.kv_tokens
            entering.append(queue.popleft())
        return entering

    def _switch_s(self, now_s: float) -> float:
        """Once, when a member of a pipeline goes on alone: KV of the layers that were elsewhere is fetched or made
        again (the share of the others' layers is taken to be what an even pipeline has)."""
        if self._switched or now_s < self.alone_s or self._room is None:
            return 0.0
        self._switched = True
        tokens = self.kv_tokens
        elsewhere = 1.0 - 1.0 / max(1, len(self._room.alone_s))
        leg = Leg(int(tokens * self._limits.kv_token_bytes * elsewhere), self._links.network_bytes_s)
        choice = choose_way([leg], tokens, self._cost.prefill_tokens_per_s(512))
        self.pause_s = min(choice.move_s, choice.recompute_s) if tokens else 0.0
        return self.pause_s
