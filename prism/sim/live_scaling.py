"""One model's bursts on machines that load it when needed: arrival of layers, pipelines, pairs, switches, pool.

Who loads what from where is :mod:`prism.sim.live_arrivals`, how many instances there should be is the production
policy (:func:`prism.policy.replicas.instances_needed`, :class:`prism.policy.autoscale.AutoScaler`) for every system
alike, and how Prism serves meanwhile is chosen by :func:`prism.policy.live.choice.choose_scaling`. Requests wait in one
line and go to whoever has room; steps take what :mod:`prism.sim.roofline` says.

A machine keeps the model in host memory for ``keep_s`` after it left its devices. Systems of the pool (Prism's) have a
copy in some machine's host memory always.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from prism.core.specs import ModelSpec
from prism.policy.autoscale import AutoScaler, ScaleBounds
from prism.policy.live.choice import Receiver, ScaleChoice, ScaleOutCase, ScaleWay, choose_scaling
from prism.policy.replicas import ModelLoad, instances_needed
from prism.sim.gpus import GpuKind
from prism.sim.live_arrivals import LiveArrivals, LiveLinks, LiveSystem, ScaleOutRequest, plan_arrivals
from prism.sim.live_server import LiveJob, LiveServer, PipelineRoom, ServerLimits
from prism.sim.machines import USABLE
from prism.sim.roofline import step_cost

LOOK_S: Final = 0.1
"""Between two looks at the load."""
_RATE_S: Final = 1.0
"""Arrivals of so long are the rate."""
_BURST_S: Final = 0.3
"""A burst begins faster than that rate shows."""
_WAIT_SHARE: Final = 0.25
"""Part of its objective after which waiting is too long."""
_POOL: Final = (LiveSystem.PRISM, LiveSystem.PIPELINES, LiveSystem.ZIGZAG, LiveSystem.MULTICAST)
_LOADING: Final = tuple(way for way in ScaleWay if way is not ScaleWay.WAIT)
"""As in :func:`prism.policy.live.scale_out.choose_scale_out`: how many instances there are is not the choice's."""
_WAYS: Final = {ScaleWay.PIPELINES: LiveSystem.PIPELINES, ScaleWay.ZIGZAG: LiveSystem.ZIGZAG}


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """What there is. A machine has one instance's devices."""

    spec: ModelSpec
    gpu: GpuKind
    machines: int
    links: LiveLinks = field(default_factory=LiveLinks)
    batch: int = 64
    most_sources: int = 4
    start_with: int = 1
    """Instances that serve at the beginning; they stay."""
    cached: int = 0
    """Machines, after those, that have the model in host memory at the beginning."""
    at_once: int = 0
    """So many instances are asked for at 0, and the load decides nothing; 0: it does."""
    down_after_s: float = 0.5
    keep_s: float = 60.0


@dataclass(slots=True)
class LiveOutcome:
    """What became of the requests, and what it took."""

    jobs: list[LiveJob]
    tokens: Counter[int] = field(default_factory=Counter)
    """By tenth of a second."""
    device_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)
    choices: list[ScaleChoice] = field(default_factory=list)
    most: int = 0
    """Instances at a time."""

    def ttft_s(self) -> list[float]:
        return sorted(job.first_s - job.arrival_s for job in self.jobs if job.first_s is not None)


class LiveScaling:
    """One run. Nothing is drawn: what comes in is ``jobs``, in the order of arrival."""

    def __init__(self, system: LiveSystem, fleet: LiveFleet, jobs: Sequence[LiveJob]) -> None:
        self._system, self._fleet, self._jobs = system, fleet, jobs
        self._cost = step_cost(fleet.spec, fleet.gpu)
        room_bytes = fleet.gpu.memory_bytes * USABLE * fleet.spec.tp - fleet.spec.weight_bytes
        kv_bytes = fleet.spec.shape.kv_bytes_per_token
        self._limits = ServerLimits(fleet.batch, int(room_bytes / kv_bytes), kv_bytes)
        self._room = self._most_in_time()
        self._queue: deque[LiveJob] = deque()
        self._servers: dict[str, LiveServer] = {}
        self._kept_until_s: dict[str, float] = {}
        self._scaler = AutoScaler(ScaleBounds(down_after_s=fleet.down_after_s))
        self._events: list[tuple[float, int, str, str]] = []
        self._number = self._next = self._served = self._served_before = 0
        self._recent: deque[float] = deque()
        self.outcome = LiveOutcome(list(jobs))

    def _most_in_time(self) -> int:
        """The largest batch whose tokens are in time."""
        mean = sum(j.prompt_tokens + j.answer_tokens / 2 for j in self._jobs) / max(1, len(self._jobs))
        fits = [
            b
            for b in range(1, self._fleet.batch + 1)
            if self._cost.decode(b, int(b * mean))[0].first_s <= self._fleet.spec.slo_tpot_s
        ]
        return max(fits, default=1)

    def run(self) -> LiveOutcome:
        names = [f"m{i}" for i in range(self._fleet.machines)]
        for name in names[: self._fleet.start_with]:
            self._add(LiveServer(name, 0.0, Receiver(0.0, 0.0), self._cost, self._limits, self._fleet.links))
        first = self._fleet.start_with
        self._kept_until_s = dict.fromkeys(names[first : first + self._fleet.cached], float("inf"))
        if self._jobs:
            self._at(self._jobs[0].arrival_s, "arrive")
        self._at(0.0, "look")
        now_s = 0.0
        while self._events and (self._queue or self._next < len(self._jobs) or self._busy()):
            now_s, _, what, name = heapq.heappop(self._events)
            self._happened(what, name, now_s)
        for server in self._servers.values():
            self._pay(server, now_s)
        return self.outcome

    def _busy(self) -> bool:
        return any(s.running or s.busy_until_s > 0.0 for s in self._servers.values())

    def _at(self, time_s: float, what: str, name: str = "") -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, what, name))

    def _happened(self, what: str, name: str, now_s: float) -> None:
        if what == "arrive":
            while self._next < len(self._jobs) and self._jobs[self._next].arrival_s <= now_s:
                self._queue.append(self._jobs[self._next])
                self._recent.append(now_s)
                self._next += 1
            if self._next < len(self._jobs):
                self._at(self._jobs[self._next].arrival_s, "arrive")
            self._wake(now_s)
        elif what == "look":
            self._look(now_s)
            self._wake(now_s)
            self._at(now_s + LOOK_S, "look")
        elif name in self._servers:
            if what == "step":
                self._stepped(self._servers[name], now_s)
            self._wake_one(self._servers[name], now_s)

    def _stepped(self, server: LiveServer, now_s: float) -> None:
        server.busy_until_s = 0.0
        made, done = server.end_step(now_s)
        self.outcome.tokens[int(now_s * 10)] += made
        self._served += len(done)

    def _wake(self, now_s: float) -> None:
        """What waits is shared out evenly over those that are free; no more than one in its turn has room for."""
        free = [s for s in self._servers.values() if s.busy_until_s == 0.0 and s.speed(now_s) > 0.0]
        for index, server in enumerate(sorted(free, key=lambda s: (-s.speed(now_s), len(s.running)))):
            self._wake_one(server, now_s, len(free) - index)

    def _wake_one(self, server: LiveServer, now_s: float, free: int = 1) -> None:
        most = -(-len(self._queue) // free)
        if server.busy_until_s == 0.0 and (end_s := server.begin_step(self._queue, now_s, most)) is not None:
            self._at(end_s, "step", server.name)

    def _add(self, server: LiveServer) -> None:
        self._servers[server.name] = server
        for at_s in sorted({server.first_s, server.alone_s}):
            self._at(at_s, "ready", server.name)
        self.outcome.most = max(self.outcome.most, len(self._servers))

    def _pay(self, server: LiveServer, now_s: float) -> None:
        self.outcome.device_s += (now_s - server.began_s) * self._fleet.spec.tp
        if server.pause_s:
            self.outcome.pauses_s.append(server.pause_s)

    # --- how many ---

    def _look(self, now_s: float) -> None:
        while self._recent and self._recent[0] < now_s - _RATE_S:
            self._recent.popleft()
        have = len(self._servers)
        if self._fleet.at_once:
            if now_s == 0.0:
                self._grow(self._fleet.at_once, now_s)
            return
        running = sum(len(s.running) for s in self._servers.values())
        needed = min(self._fleet.machines, self._needed(now_s, running))
        if needed > have:
            self._grow(needed - have, now_s)
            return
        load = (running + len(self._queue)) / (self._room * max(1, have))
        if have > self._fleet.start_with and self._scaler.decide_target(now_s, have, load) < have:
            self._shrink(now_s)

    def _needed(self, now_s: float, running: int) -> int:
        oldest_s = now_s - self._queue[0].arrival_s if self._queue else 0.0
        have = max(1, len(self._servers))
        if not self._servers and not self._queue:
            return 0
        ready = [s for s in self._servers.values() if s.alone_s <= now_s]
        load = ModelLoad(
            instances=have,
            running=running,
            waiting=len(self._queue),
            # Those that still come are on their way for what waits.
            hot=oldest_s > _WAIT_SHARE * self._fleet.spec.slo_ttft_s and len(ready) == len(self._servers),
            arrivals_per_s=len(self._recent) / _RATE_S,
            served_per_s=0.0,
            usual_per_s=0.0,
            residence_s=self._residence_s(),
            room=float(self._room),
        )
        return max(self._fleet.start_with, instances_needed(load))

    def _residence_s(self) -> float:
        """What a request takes in a batch that is just full."""
        answer = sum(job.answer_tokens for job in self._jobs) / max(1, len(self._jobs))
        return answer * self._fleet.spec.slo_tpot_s * 0.8

    def _shrink(self, now_s: float) -> None:
        idle = [s for s in self._servers.values() if not s.running and s.busy_until_s == 0.0 and s.alone_s <= now_s]
        if idle:
            gone = max(idle, key=lambda s: s.began_s)
            del self._servers[gone.name]
            self._kept_until_s[gone.name] = now_s + self._fleet.keep_s
            self._pay(gone, now_s)

    # --- where from ---

    def _grow(self, count: int, now_s: float) -> None:
        kept = {name for name, until_s in self._kept_until_s.items() if until_s > now_s}
        names = [f"m{i}" for i in range(self._fleet.machines) if f"m{i}" not in self._servers]
        receivers = tuple(sorted(names, key=lambda n: (n not in kept, int(n[1:])))[:count])
        if not receivers:
            return
        sources = [s.name for s in self._servers.values() if s.alone_s <= now_s]
        in_memory = sorted(kept - set(receivers))
        if self._system in _POOL and not sources:
            sources = in_memory or ["pool"]
        wanted = ScaleOutRequest(
            self._fleet.spec.weight_bytes,
            self._fleet.spec.shape.layers,
            tuple(sources),
            receivers,
            frozenset(receivers) & kept,
            self._fleet.most_sources,
        )
        system, arrivals = self._chosen(wanted, now_s)
        self._start(system, arrivals, now_s)

    def _chosen(self, wanted: ScaleOutRequest, now_s: float) -> tuple[LiveSystem, LiveArrivals]:
        if self._system is not LiveSystem.PRISM:
            return self._system, plan_arrivals(self._system, wanted, self._fleet.links)
        piped = plan_arrivals(LiveSystem.PIPELINES, wanted, self._fleet.links)
        chained = plan_arrivals(LiveSystem.ZIGZAG, wanted, self._fleet.links)
        serving = [s for s in self._servers.values() if s.alone_s <= now_s]
        coming = [s for s in self._servers.values() if s.alone_s > now_s]
        whole_s = max(r.alone_s for r in (*piped.receivers.values(), *chained.receivers.values()))
        full = len(serving) if self._queue else sum(len(s.running) >= self._room for s in serving)
        case = ScaleOutCase(
            receivers=tuple(piped.receivers.values()),
            ready_s=piped.ready_s,
            serving=len(serving),
            overloaded=min(full, self._unpaired(now_s)),
            served_per_s=self._served_per_s(),
            waiting=len(self._queue),
            arrivals_per_s=max(len(self._recent) / _RATE_S, sum(t > now_s - _BURST_S for t in self._recent) / _BURST_S),
            objective_s=self._fleet.spec.slo_ttft_s,
            horizon_s=2.0 * whole_s,
            coming=tuple(Receiver(s.alone_s - now_s, s.alone_s - now_s) for s in coming),
            chained=tuple(chained.receivers.values()),
            stage_wait=self._fleet.links.stage_wait,
        )
        choice = choose_scaling(case, possible=_LOADING)
        self.outcome.choices.append(choice)
        system = _WAYS.get(choice.way, LiveSystem.MULTICAST)
        return system, chained if system is LiveSystem.ZIGZAG else piped

    def _served_per_s(self) -> float:
        """First tokens/s of an instance: a batch that is just full leaves and comes once a residence, or prompts one
        after the other if that is slower."""
        prompt = sum(job.prompt_tokens for job in self._jobs) / max(1, len(self._jobs))
        prefill_s = prompt / self._cost.prefill_tokens_per_s(512)
        return min(1.0 / prefill_s, self._room / max(self._residence_s(), prefill_s))

    def _start(self, system: LiveSystem, arrivals: LiveArrivals, now_s: float) -> None:
        together = system is LiveSystem.PIPELINES
        rooms = {
            number: PipelineRoom(
                now_s + ready_s, [now_s + r.alone_s for r in arrivals.receivers.values() if r.pipeline == number]
            )
            for number, ready_s in arrivals.ready_s.items()
            if together
        }
        unpaired = self._unpaired(now_s)
        for index, (name, receiver) in enumerate(sorted(arrivals.receivers.items(), key=lambda r: r[1].alone_s)):
            room = None if receiver.pipeline is None else rooms.get(receiver.pipeline)
            paired = system is LiveSystem.ZIGZAG and index < unpaired
            limits, links = self._limits, self._fleet.links
            self._add(LiveServer(name, now_s, receiver, self._cost, limits, links, room, paired))

    def _unpaired(self, now_s: float) -> int:
        """Instances that serve and run nobody's layers: each does so for one newcomer at a time."""
        servers = self._servers.values()
        return sum(s.alone_s <= now_s for s in servers) - sum(s.paired and s.alone_s > now_s for s in servers)
