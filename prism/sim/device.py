"""One device of the simulated fleet: its account, its compute, its engines and the production :class:`GpuScheduler`.

Plays the part that node agent and engine workers play in the live system for this device: tells the scheduler what
happened, carries out what it wants, reports to the controller. A tensor-parallel instance is run by its rank-0 device;
the others only hold its shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism.core.effects import Abort, Dispatch, GpuEffect, Refuse, SendBack
from prism.core.events import (
    AttemptLost,
    DispatchRejected,
    EngineDown,
    EngineDraining,
    EngineLoad,
    EngineUp,
    Finished,
    FirstToken,
    GpuEvent,
    MemoryReport,
    RequestArrived,
    Tick,
)
from prism.core.ids import ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import DeviceSpec
from prism.scheduler.gpu import GpuScheduler
from prism.sim.account import Account
from prism.sim.engine import Engine
from prism.sim.gpus import Gpu
from prism.sim.job import Job
from prism.sim.reports import Reports, Shard
from prism.sim.sharing import Pool

if TYPE_CHECKING:
    from prism.sim.world import World

_TICK = Tick()


class Device:
    """See the module."""

    def __init__(self, world: World, spec: DeviceSpec, gpu: Gpu, pool: Pool, settings: GpuSettings) -> None:
        self.world, self.spec, self.gpu, self.pool = world, spec, gpu, pool
        self.id = spec.id
        self.account = Account(world.queue, spec.memory_bytes, gpu.page_bytes)
        self.scheduler = GpuScheduler(spec.id, settings)
        self.shards: dict[InstanceKey, Shard] = {}
        self.engines: dict[ModelName, Engine] = {}
        """Engines whose rank 0 is here."""
        self.jobs: dict[RequestId, Job] = {}
        """Requests in this device's queue or engines."""
        self.waiting: dict[ModelName, int] = {}
        """Requests in the scheduler's queue."""
        self.parked = world.cluster.load.parked_per_device if world.settings.cluster.engine_pool else 0
        self.starting = 0
        """Engines that are being started to be parked."""
        self.gone = False
        self._used_s: dict[ModelName, float] = {}
        """When a request of the model was last taken in or done, or its engine came up."""
        self._draining: dict[ModelName, None] = {}
        self._greedy = settings.admission is Admission.GREEDY
        self._stale: dict[Engine, None] = {}
        """Engines whose load the scheduler does not know."""
        self._wake = world.queue.alarm(self._tick)
        self.reports = Reports(self)

    # --- requests ---

    def arrive(self, job: Job) -> None:
        """``job`` enters this device's queue."""
        job.device = self.id
        self.jobs[job.id] = job
        self._queued(job.model)
        self.tell_loads()
        self.tell(RequestArrived(job.request()))
        self.touch()

    def tell(self, event: GpuEvent) -> None:
        """Give ``event`` to the scheduler and do what it wants."""
        scheduler = self.scheduler
        effects = scheduler.on_event(event, self.world.queue.now_s)
        if effects:
            self._do(effects)
        if scheduler.shortage.is_short:
            self.reports.watch_shortage()
        wake_s = scheduler.wake_s
        if wake_s is not None:
            self._wake.set(wake_s)
        elif self._wake.at_s is not None:
            self._wake.clear()

    def tell_loads(self) -> None:
        """Report memory and engine loads that the scheduler does not know yet."""
        if self._greedy or not self.engines:
            return
        stale, self._stale = self._stale, {}
        for engine in self.engines.values():
            if engine in stale or engine.batch.jobs:
                self.tell(_engine_load(engine))
        self.tell(MemoryReport(self.account.free_bytes(), self._wanted_bytes()))

    def _wanted_bytes(self) -> int:
        """What engines here lack and wait for: a page each, which is all that anybody asks."""
        intakes = [engine.intake for engine in self.engines.values()]
        return self.account.page_bytes * sum(intake.hungry and bool(intake.waiting) for intake in intakes)

    def _tick(self, _: object) -> None:
        self.tell_loads()
        self.tell(_TICK)

    def _do(self, effects: list[GpuEffect]) -> None:
        for effect in effects:
            self.world.recorder.decided(effect, self.world.queue.now_s)
            job = self.jobs[effect.id]
            if isinstance(effect, Dispatch):
                self._dequeued(job.model)
                engine = self.engines.get(effect.model)
                if engine is None or engine.key != effect.key:
                    self._queued(job.model)
                    self.tell(DispatchRejected(effect.id))
                else:
                    self._stale[engine] = None
                    engine.submit(job)
            elif isinstance(effect, Abort):
                if job.engine is not None:
                    job.engine.abort(job)
                    self._used_s[job.model] = self.world.queue.now_s
                del self.jobs[job.id]
            else:
                self._dequeued(job.model)
                del self.jobs[job.id]
                if isinstance(effect, SendBack):
                    self.world.front.send_back(job)
                else:
                    assert isinstance(effect, Refuse)
                    job.error = f"refused:{effect.reason.code.value}"
                    self.world.front.ended(job)

    def _queued(self, model: ModelName) -> None:
        self.waiting[model] = self.waiting.get(model, 0) + 1

    def _dequeued(self, model: ModelName) -> None:
        self._used_s[model] = self.world.queue.now_s
        left = self.waiting[model] - 1
        if left:
            self.waiting[model] = left
        else:
            del self.waiting[model]

    # --- engines (EngineSink) ---

    def first_token(self, engine: Engine, job: Job) -> None:
        if job.first_token_s < 0.0:
            job.first_token_s = self.world.queue.now_s
        self._stale[engine] = None
        self.tell(FirstToken(job.id))

    def finished(self, engine: Engine, job: Job) -> None:
        self._stale[engine] = None
        self._used_s[job.model] = self.world.queue.now_s
        if self.jobs.pop(job.id, None) is not None:
            self.tell(Finished(job.id))
            self.world.front.ended(job)

    def stepped(self, engine: Engine) -> None:
        self._stale[engine] = None
        self.touch()
        if self.waiting:
            self.tell_loads()
        if engine.model in self._draining and not self.has_work(engine):
            self.world.nodes.drained(self, engine)

    def has_work(self, engine: Engine) -> bool:
        """Requests are in the engine."""
        return engine.jobs > 0

    def idle_s(self, engine: Engine) -> float:
        """How long the engine's model has had no request here; 0 while it has one."""
        return 0.0 if engine.jobs or engine.model in self.waiting else self.rested_s(engine.model)

    def rested_s(self, model: ModelName) -> float:
        """Since a request of the model was last taken in or done here, or its engine came up."""
        return self.world.queue.now_s - self._used_s.get(model, 0.0)

    def serve(self, engine: Engine, max_request_tokens: int, bytes_per_token: int) -> None:
        """``engine`` takes requests from now on."""
        self.engines[engine.model] = engine
        limits = engine.limits
        self.tell(
            EngineUp(
                engine.key,
                engine.cost.prefill_tokens_per_s(min(2048, limits.chunk_tokens)),
                bytes_per_token,
                limits.max_running,
                limits.chunk_tokens,
                max_request_tokens,
                engine.kv.elastic,
                self.account.page_bytes,
            )
        )
        self._stale[engine] = None
        self._used_s[engine.model] = self.world.queue.now_s
        self.tell_loads()
        self.touch()
        self.reports.watch(self.world.specs[engine.model].keep_alive_s)

    def drain(self, engine: Engine) -> None:
        """No new requests for ``engine``; :meth:`prism.sim.nodes.Nodes.drained` is called when it is empty."""
        self._draining[engine.model] = None
        self.tell(EngineDraining(engine.key))
        if not self.has_work(engine):
            self.world.nodes.drained(self, engine)

    def end_engine(self, engine: Engine) -> None:
        """``engine`` is gone; its unfinished requests are dispatched elsewhere or sent back with their tokens."""
        lost = engine.stop()
        self._draining.pop(engine.model, None)
        self._stale.pop(engine, None)
        if self.engines.get(engine.model) is engine:
            del self.engines[engine.model]
        self.tell(EngineDown(engine.key))
        for job in lost:
            job.lost_times += 1
            if job.id in self.jobs:
                self._queued(job.model)
                self.tell(AttemptLost(job.id, job.generated))
        self.touch()

    def fail(self) -> list[Job]:
        """The device is gone with everything on it; returns its requests."""
        self.gone = True
        for engine in list(self.engines.values()):
            engine.stop()
        self.engines.clear()
        self._wake.clear()
        self.reports.stop()
        jobs = list(self.jobs.values())
        self.jobs.clear()
        self.waiting.clear()
        return jobs

    # --- memory of weights ---

    def hold(self, key: InstanceKey, weight_bytes: int, rank: int) -> Shard | None:
        """Take the memory of a shard's weights; None when there is not enough."""
        pages = self.account.pages(weight_bytes)
        if not self.account.take(pages) and not (self.account.reclaim(pages) and self.account.take(pages)):
            return None
        shard = Shard(key, pages * self.account.page_bytes, rank=rank)
        self.shards[key] = shard
        self.touch()
        return shard

    def drop(self, key: InstanceKey) -> None:
        """Give the memory of a shard's weights back."""
        shard = self.shards.pop(key, None)
        if shard is not None:
            self.account.give(shard.weight_bytes // self.account.page_bytes)
            self.touch()

    def touch(self) -> None:
        """Something that the controller reads has changed."""
        self.reports.touch()


def _engine_load(engine: Engine) -> EngineLoad:
    return EngineLoad(
        engine.key, engine.running, len(engine.intake.waiting), engine.kv.spare_tokens(), engine.backlog_tokens
    )
