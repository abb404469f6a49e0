"""The device's scheduler under any sequence of events: no request is lost or handed out twice, memory and batch bounds
hold, and with engines that answer everything ends."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
    RequestCancelled,
    Tick,
)
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import LatePolicy
from prism.scheduler.gpu import GpuScheduler

MODELS = [ModelName(f"m{i}") for i in range(3)]
DEVICE_TOKENS = 400
RESERVE = 8


@dataclass
class Running:
    request: Request
    has_token: bool = False


class GpuMachine(RuleBasedStateMachine):
    """A device with honest engines: one KV byte per token, all taken at dispatch."""

    admission = Admission.MOORE_HODGSON

    def __init__(self) -> None:
        super().__init__()
        self.s = GpuScheduler(DeviceId("n/host:0"), GpuSettings(self.admission, 30, decode_reserve_tokens=RESERVE))
        self.now = 0.0
        self.count = 0
        self.generation = 0
        self.keys: dict[ModelName, InstanceKey] = {}
        self.engines: dict[ModelName, bool] = {}  # value: draining
        self.max_running: dict[ModelName, int] = {}
        self.waiting: dict[RequestId, Request] = {}
        self.running: dict[RequestId, Running] = {}
        self.orphans: dict[RequestId, Request] = {}
        self.ended: set[RequestId] = set()
        self.send(MemoryReport(DEVICE_TOKENS))

    # --- the world ---

    def used(self) -> int:
        return sum(r.request.prefill_tokens for r in self.running.values())

    def send(self, event: GpuEvent) -> list[GpuEffect]:
        effects = self.s.on_event(event, self.now)
        for effect in effects:
            self.do(effect)
        assert self.s.wake_s is None or self.s.wake_s > self.now, "would spin"
        return effects

    def do(self, effect: GpuEffect) -> None:
        assert effect.id not in self.ended, "an ended request was touched"
        if isinstance(effect, Dispatch):
            request = self.waiting.pop(effect.id)
            assert effect.model == request.model
            assert self.engines.get(effect.model) is False, "dispatched to an engine that does not take requests"
            self.running[effect.id] = Running(request)
            if self.admission is not Admission.GREEDY:
                mine = sum(r.request.model == effect.model for r in self.running.values())
                assert mine <= self.max_running[effect.model]
                assert self.used() <= DEVICE_TOKENS, "over the device's memory"
        elif isinstance(effect, Refuse | SendBack):
            self.waiting.pop(effect.id)
            self.ended.add(effect.id)
        elif isinstance(effect, Abort):
            self.running.pop(effect.id)
            self.ended.add(effect.id)

    def report_memory(self) -> None:
        self.send(MemoryReport(DEVICE_TOKENS - self.used()))

    # --- what happens ---

    @rule(seconds=st.floats(0.001, 5.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.s.wake_s is not None and self.s.wake_s <= self.now:
            self.send(Tick())

    @rule(
        model=st.sampled_from(MODELS),
        tokens=st.integers(1, 150) | st.just(1000),
        slo=st.floats(0.1, 5.0),
        late=st.sampled_from(list(LatePolicy)),
        burst=st.integers(1, 4),
    )
    def arrive(self, model: ModelName, tokens: int, slo: float, late: LatePolicy, burst: int) -> None:
        for _ in range(burst):
            self.count += 1
            request = Request(RequestId(f"r{self.count}"), model, self.now, tokens, slo, 10.0, late, 20)
            self.waiting[request.id] = request
            self.send(RequestArrived(request))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def redelivered(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert not [e for e in self.send(RequestArrived(self.waiting[id])) if e.id == id and isinstance(e, Refuse)] or (
            id in self.ended
        )

    @rule(model=st.sampled_from(MODELS), max_running=st.integers(1, 6), chunk=st.sampled_from([64, 8192]))
    def engine_up(self, model: ModelName, max_running: int, chunk: int) -> None:
        if model not in self.engines:
            self.generation += 1
            self.engines[model], self.max_running[model] = False, max_running
            self.keys[model] = InstanceKey(model, Generation(self.generation))
            up = EngineUp(self.keys[model], 100.0, 1, max_running, chunk)
            self.send(up)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def engine_draining(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.engines)))
        self.engines[model] = True
        self.send(EngineDraining(self.keys[model]))
        assert not [r for r in self.waiting.values() if r.model == model]

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def engine_down(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.engines)))
        del self.engines[model]
        for id, running in list(self.running.items()):
            if running.request.model == model:
                self.orphans[id] = self.running.pop(id).request
        self.send(EngineDown(self.keys[model]))
        assert not [r for r in self.waiting.values() if r.model == model]
        self.report_memory()

    @precondition(lambda self: self.orphans)
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def attempt_lost(self, data: st.DataObject, tokens: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.orphans)))
        self.waiting[id] = self.orphans.pop(id).resumed(tokens)
        self.send(AttemptLost(id, tokens))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        self.running[id].has_token = True
        self.send(FirstToken(id))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finished(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[id]
        self.ended.add(id)
        self.send(Finished(id))
        self.report_memory()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def rejected(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        self.waiting[id] = self.running.pop(id).request
        self.send(DispatchRejected(id))

    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        known = sorted({**self.waiting, **self.running, **self.orphans})
        if known:
            id = data.draw(st.sampled_from(known))
            self.waiting.pop(id, None)
            self.orphans.pop(id, None)
            effects = self.send(RequestCancelled(id))
            assert any(isinstance(e, Abort) and e.id == id for e in effects) == (id in self.ended)
            self.ended.add(id)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.engines)))
        mine = [r for r in self.running.values() if r.request.model == model]
        begun = sum(r.has_token for r in mine)
        self.send(EngineLoad(self.keys[model], begun, len(mine) - begun, 0))
        self.report_memory()

    # --- what must hold ---

    @invariant()
    def every_request_is_somewhere_once(self) -> None:
        for id in (*self.waiting, *self.running, *self.orphans):
            assert self.s.owns(id)
        for id in self.ended:
            assert not self.s.owns(id)
        assert len(self.s.positions()) == len(self.waiting)

    def teardown(self) -> None:
        """With all engines up and answering, nothing waits for ever."""
        for model in MODELS:
            self.engines[model], self.max_running[model] = False, 4
            self.generation += 1
            for id, running in list(self.running.items()):
                if running.request.model == model:
                    self.orphans[id] = self.running.pop(id).request
            self.keys[model] = InstanceKey(model, Generation(self.generation))
            self.send(EngineUp(self.keys[model], 100.0, 1, 4))
        for id in list(self.orphans):
            self.waiting[id] = self.orphans.pop(id)
            self.send(AttemptLost(id, 0))
        steps = 0
        while self.waiting or self.running:
            steps += 1
            assert steps < 500, "waits for ever"
            self.now += 1.0
            for id in list(self.running):
                self.send(FirstToken(id))
                del self.running[id]
                self.ended.add(id)
                self.send(Finished(id))
            self.report_memory()
            if self.s.wake_s is not None:
                self.now = max(self.now, self.s.wake_s)
                self.send(Tick())


class FcfsMachine(GpuMachine):
    admission = Admission.FCFS


class GreedyMachine(GpuMachine):
    admission = Admission.GREEDY


TestMooreHodgson = GpuMachine.TestCase
TestMooreHodgson.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestFcfs = FcfsMachine.TestCase
TestFcfs.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestGreedy = GreedyMachine.TestCase
TestGreedy.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
