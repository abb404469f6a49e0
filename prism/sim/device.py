"""One device of the simulated fleet: its account, its compute, its engines and the production :class:`GpuScheduler`.

Plays the part that node agent and engine workers play in the live system for this device: tells the scheduler what
happened, carries out what it wants, reports to the controller. A tensor-parallel instance is run by its rank-0 device;
the others only hold its shards.
"""

from __future__ import annotations

from typing import Protocol

from prism.core.device_events import (
    EngineDown,
    EngineDraining,
    EngineLoad,
    EngineUp,
    FirstToken,
    GpuEvent,
    MemoryReport,
)
from prism.core.effects import Dispatch, GpuEffect, Hold, Refuse, SendBack
from prism.core.events import DeviceReport, Tick
from prism.core.instances import InstanceKey
from prism.core.pace import DevicePace
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.profiles import prefill_on, step_rates
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.request_life import DeviceRequests, Stage
from prism.sim.account import Account
from prism.sim.cluster_sections import TimingSection
from prism.sim.engine import Engine
from prism.sim.gpus import GpuKind
from prism.sim.holding import HeldEngines
from prism.sim.job import Job
from prism.sim.queue import EventQueue
from prism.sim.reports import DeviceShard, Reports
from prism.sim.sharing import Pool

_TICK = Tick()


class DeviceSink(Protocol):
    """Who hears of a device's progress."""

    def decided(self, effect: GpuEffect | Hold) -> None:
        """Its scheduler decided ``effect``, which is carried out next."""

    def ended(self, job: Job) -> None:
        """``job`` has its last token or an error."""

    def sent_back(self, job: Job) -> None:
        """``job`` is to wait elsewhere: its model is not active here any more."""

    def emptied(self, engine: Engine) -> None:
        """A draining engine runs nothing any more."""

    def reported(self, report: DeviceReport) -> None:
        """A report for the controller."""


class SimDevice:
    """See the module."""

    def __init__(
        self,
        spec: DeviceSpec,
        gpu: GpuKind,
        pool: Pool,
        settings: GpuSettings,
        queue: EventQueue,
        sink: DeviceSink,
        timing: TimingSection,
        pace: DevicePace | None,
    ) -> None:
        self.id, self.spec, self.gpu, self.pool = spec.id, spec, gpu, pool
        self._pace = pace
        self.account = Account(queue, spec.memory_bytes, gpu.page_bytes)
        self.scheduler = GpuScheduler(spec.id, settings, spec.kind)
        self.requests: DeviceRequests[Job] = DeviceRequests()
        """In this device's queue or engines."""
        self.shards: dict[InstanceKey, DeviceShard] = {}
        self.engines: dict[InstanceKey, Engine] = {}
        """Engines whose rank 0 is here."""
        self.gone = False
        self._queue, self._sink = queue, sink
        self._draining: dict[InstanceKey, None] = {}
        self._greedy = settings.admission is Admission.GREEDY
        self._stale: dict[Engine, None] = {}
        """Engines whose load the scheduler does not know."""
        self._wake = queue.alarm(self._tick)
        self._reports = Reports(self, queue, float(timing.report_every), sink.reported)
        self._resume_s = float(timing.resume)
        self._holding = HeldEngines(queue, self.scheduler.pauses, self.engines, sink.decided)

    # --- requests ---

    def arrive(self, job: Job) -> None:
        """``job`` enters this device's queue."""
        job.device = self.id
        self.tell_loads()
        self.tell(self.requests.admit(job))
        self._reports.touch()

    def tell(self, event: GpuEvent) -> None:
        """Give ``event`` to the scheduler and do what it wants."""
        scheduler = self.scheduler
        effects = scheduler.on_event(event, self._queue.now_s)
        if effects:
            self._carry_out(effects)
        if scheduler.shortage.is_short:
            self._reports.watch_shortage()
        if scheduler.queued:
            self._reports.watch_backlog()
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
        changed = [engine for engine in self.engines.values() if engine in stale or engine.batch.jobs]
        if self.scheduler.rests:  # as when most requests come
            memory = MemoryReport(self.account.free_bytes(), self._wanted_bytes())
            self.scheduler.take_loads(map(_engine_load, changed), memory, self._queue.now_s)
            if self.scheduler.shortage.is_short:
                self._reports.watch_shortage()
            return
        for engine in changed:
            self.tell(_engine_load(engine))
        self.tell(MemoryReport(self.account.free_bytes(), self._wanted_bytes()))

    def _wanted_bytes(self) -> int:
        """What engines here lack and wait for: a page each, which is all that anybody asks."""
        intakes = [engine.intake for engine in self.engines.values()]
        return self.account.page_bytes * sum(intake.hungry and bool(intake.waiting) for intake in intakes)

    def _tick(self, _: object) -> None:
        self.tell_loads()
        self.tell(_TICK)

    def _carry_out(self, effects: list[GpuEffect]) -> None:
        for effect in effects:
            self._sink.decided(effect)
            job = self.requests.get(effect.id)
            assert job is not None  # the scheduler speaks of what it was given
            if isinstance(effect, Dispatch):
                self._dispatch(job, effect.key)
                continue
            self.requests.give_up(job, self._queue.now_s)
            self._forget(job)
            if isinstance(effect, SendBack):
                self._sink.sent_back(job)
            else:
                assert isinstance(effect, Refuse)  # simulated clients do not go away, so that nothing is aborted
                job.error = f"refused:{effect.reason.code.value}"
                self._sink.ended(job)

    def _dispatch(self, job: Job, key: InstanceKey) -> None:
        self.requests.dispatch(job, key)
        engine = self.engines.get(key)
        if engine is None:
            self.tell(self.requests.reject_dispatch(job))
        else:
            self._stale[engine] = None
            engine.submit(job)

    def _forget(self, job: Job) -> None:
        untold = self.requests.forget(job, self._queue.now_s)
        assert untold is None  # its end was told, or came from the scheduler

    # --- engines (EngineSink) ---

    def first_token(self, engine: Engine, job: Job) -> None:
        if job.first_token_s < 0.0:
            job.first_token_s = self._queue.now_s
        self._stale[engine] = None
        self.tell(FirstToken(job.id))
        self._holding.changed()

    def finished(self, engine: Engine, job: Job) -> None:
        self._stale[engine] = None
        if job.id in self.requests:
            self.tell(self.requests.close(job, self._queue.now_s, job.generated))
            self._forget(job)
            self._sink.ended(job)
            self._holding.changed()

    def stepped(self, engine: Engine) -> None:
        self._stale[engine] = None
        self._reports.touch()
        if self.scheduler.queued:
            self.tell_loads()
        if engine.key in self._draining and not self.requests.running(engine.key):
            self._sink.emptied(engine)

    def serve(self, engine: Engine, model: ModelSpec) -> None:
        """``engine`` takes requests of ``model`` from now on."""
        self.engines[engine.key] = engine
        limits = engine.limits
        measured = engine.cost.prefill_tokens_per_s(min(2048, limits.chunk_tokens))
        self.tell(
            EngineUp(
                engine.key,
                prefill_on(model, self.spec.kind, measured),
                engine.kv.bytes_per_token,
                limits.max_running,
                limits.chunk_tokens,
                model.context_tokens,
                engine.kv.elastic,
                self.account.page_bytes,
                weight_bytes=model.shard_weight_bytes,
                slo_tpot_s=model.slo_tpot_s,
                prefer=model.prefer,
                rates=step_rates(model, self.spec.kind, self._pace),
                stands_still=model.tp == 1,
            )
        )
        self._stale[engine] = None
        self.requests.came_up(engine.key.model, self._queue.now_s)
        self.tell_loads()
        self._reports.touch()
        self._reports.watch_keep_alive(engine.key, model.keep_alive_s)

    def stop_admitting(self, engine: Engine) -> None:
        """No new requests for ``engine``; the sink hears when it is empty."""
        self._draining[engine.key] = None
        self.tell(EngineDraining(engine.key))

    def end_engine(self, engine: Engine) -> None:
        """``engine`` is gone; its unfinished requests are dispatched again or sent back, with their tokens, when their
        front doors have said which these are."""
        unfinished = engine.stop()
        self._draining.pop(engine.key, None)
        self._stale.pop(engine, None)
        self._reports.forget_keep_alive(engine.key)
        self.engines.pop(engine.key, None)
        self.tell(EngineDown(engine.key))
        self._holding.changed()
        for job in unfinished:
            self.requests.lose(job)
            self._queue.after(self._resume_s, self._front_answered, job)
        self._reports.touch()

    def _front_answered(self, job: Job) -> None:
        """The front door has said what the client of a lost request has."""
        if job.stage is Stage.LOST:  # else the device is gone, and the job with it
            self.tell(self.requests.admit(job))

    def fail(self) -> list[Job]:
        """The device is gone with everything on it; returns its requests."""
        self.gone = True
        for engine in list(self.engines.values()):
            engine.stop()
        self.engines.clear()
        self._wake.clear()
        self._holding.stop()
        self._reports.stop()
        return self.requests.clear()

    def report_now(self) -> None:
        """The controller is about to hear of an instance here, and has the numbers that go with it."""
        self._reports.send_now()

    # --- memory of weights ---

    def hold(self, key: InstanceKey, weight_bytes: int, *, leads: bool) -> DeviceShard | None:
        """Take the memory of a shard's weights and of its engine's process; None when there is not enough."""
        pages = self.account.pages(weight_bytes) + self.account.pages(self.spec.engine_bytes)
        if not self.account.take(pages) and not (self.account.reclaim(pages) and self.account.take(pages)):
            return None
        shard = DeviceShard(key, pages * self.account.page_bytes, leads)
        self.shards[key] = shard
        self._reports.touch()
        return shard

    def drop(self, key: InstanceKey) -> None:
        """Give the memory of a shard's weights back."""
        shard = self.shards.pop(key, None)
        if shard is not None:
            self.account.give(shard.weight_bytes // self.account.page_bytes)
            self._reports.touch()


def _engine_load(engine: Engine) -> EngineLoad:
    kv = engine.kv
    return EngineLoad(engine.key, engine.running, len(engine.intake.waiting), kv.free_tokens(), kv.cache.idle_tokens)
