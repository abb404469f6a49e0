"""The device's scheduler under any sequence of events: no request is lost or handed out twice, memory and batch bounds
hold, and with engines that answer everything ends."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prism.core.device_events import (
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
)
from prism.core.effects import Abort, Dispatch, GpuEffect, Refuse, SendBack
from prism.core.events import Tick
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
    key: InstanceKey
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
        self.engines: dict[InstanceKey, bool] = {}  # in order of coming up; value: draining
        self.max_running: dict[InstanceKey, int] = {}
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
            assert effect.key == self.serving(request.model), "not to the newest instance that takes requests"
            self.running[effect.id] = Running(request, effect.key)
            if self.admission is not Admission.GREEDY:
                assert len(self.run_by(effect.key)) <= self.max_running[effect.key]
                assert self.used() <= DEVICE_TOKENS, "over the device's memory"
        elif isinstance(effect, Refuse | SendBack):
            self.waiting.pop(effect.id)
            self.ended.add(effect.id)
        elif isinstance(effect, Abort):
            self.running.pop(effect.id)
            self.ended.add(effect.id)

    def serving(self, model: ModelName) -> InstanceKey | None:
        return next((key for key, drains in reversed(self.engines.items()) if key.model == model and not drains), None)

    def run_by(self, key: InstanceKey) -> list[Running]:
        return [r for r in self.running.values() if r.key == key]

    def come_up(self, model: ModelName, max_running: int, chunk: int = 8192) -> None:
        self.generation += 1
        key = InstanceKey(model, Generation(self.generation))
        self.engines[key], self.max_running[key] = False, max_running
        self.send(EngineUp(key, 100.0, 1, max_running, chunk))

    def go_down(self, key: InstanceKey) -> None:
        del self.engines[key]
        for id, running in list(self.running.items()):
            if running.key == key:
                self.orphans[id] = self.running.pop(id).request
        self.send(EngineDown(key))
        self.nobody_waits_in_vain(key.model)

    def nobody_waits_in_vain(self, model: ModelName) -> None:
        assert self.serving(model) or not [r for r in self.waiting.values() if r.model == model]

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
        if sum(key.model == model for key in self.engines) < 2:
            self.come_up(model, max_running, chunk)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def engine_draining(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.engines)))
        self.engines[key] = True
        self.send(EngineDraining(key))
        self.nobody_waits_in_vain(key.model)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def engine_down(self, data: st.DataObject) -> None:
        self.go_down(data.draw(st.sampled_from(sorted(self.engines))))
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
        key = data.draw(st.sampled_from(sorted(self.engines)))
        mine = self.run_by(key)
        begun = sum(r.has_token for r in mine)
        self.send(EngineLoad(key, begun, len(mine) - begun, 0))
        self.report_memory()

    # --- what must hold ---

    @invariant()
    def every_request_is_somewhere_once(self) -> None:
        for id in (*self.waiting, *self.running, *self.orphans):
            assert self.s.owns(id)
        for id in self.ended:
            assert not self.s.owns(id)
        assert len(self.s.positions()) == len(self.waiting) == self.s.queued
        for key in self.engines:
            takes = self.serving(key.model) == key
            waiting = sum(r.model == key.model for r in self.waiting.values()) if takes else 0
            assert self.s.counts(key).waiting == waiting
            assert self.s.counts(key).running == len(self.run_by(key))

    def teardown(self) -> None:
        """With all engines up and answering, nothing waits for ever."""
        for key in list(self.engines):
            self.go_down(key)
        for model in MODELS:
            self.come_up(model, 4)
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
