"""The cluster scheduler, Prism's and the rivals', under any sequence of events: no request is lost, no device is over
its capacity, no pinned or unserved model is evicted, and when the world settles every request is answered."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prism.core.events import (
    ActivationError,
    CatalogChanged,
    InstanceLost,
    OperatorDrain,
    OperatorLoad,
    OperatorUnload,
    PinChanged,
)
from prism.core.ids import ModelName, NodeId
from prism.core.settings import ClusterSettings, EvictionOrder, KvprMode, MigrationTest, Placement, PolicyName
from prism.scheduler.planning import plan, view
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices

SOAK = int(os.environ.get("PRISM_SOAK", "1"))
"""How many times more examples than usual."""
CATALOG = [
    model_spec("a", 300),
    model_spec("b", 400),
    model_spec("c", 450, keep_alive_s=5.0),
    model_spec("d", 500, slo_ttft_s=3.0),
    model_spec("e", 800, min_kv_bytes=100),
    model_spec("f", 900, tp=2),
    model_spec("huge", 5000),
]
MODELS = [m.name for m in CATALOG]


class ClusterMachine(RuleBasedStateMachine):
    policy = ClusterSettings()

    def __init__(self) -> None:
        super().__init__()
        self.w = World(self.policy, CATALOG)
        self.w.join(*node_devices("n0", 2))

    @rule(model=st.sampled_from(MODELS), count=st.integers(1, 5))
    def arrive(self, model: ModelName, count: int) -> None:
        if model in self.w.specs:
            self.w.arrive(model, count)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 4.0, 15.0]))
    def pass_time(self, seconds: float) -> None:
        self.w.pass_time(seconds)

    @rule()
    def step(self) -> None:
        self.w.step()

    @precondition(lambda self: self.w.live)
    @rule(data=st.data(), error=st.sampled_from(list(ActivationError)))
    def something_ends(self, data: st.DataObject, error: ActivationError) -> None:
        key = data.draw(st.sampled_from(sorted(self.w.live)))
        instance = self.w.live[key]
        if instance.state == "draining":
            self.w.gone(key)
        elif instance.state == "ready":
            self.w.serve(key)
        elif data.draw(st.booleans()):
            self.w.activated(key)
        else:
            self.w.failed(key, error)

    @precondition(lambda self: self.w.live)
    @rule(data=st.data())
    def engine_dies(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.w.live)))
        instance = self.w.live.pop(key)
        events = [InstanceLost(key), *self.w._to_inactive(key[0], instance.running)]
        for event in events:
            self.w.send(event)

    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        if self.w.devices:
            self.w.report(data.draw(st.sampled_from(sorted(self.w.devices))))

    @rule(node=st.sampled_from(["n0", "n1"]))
    def node_comes_or_goes(self, node: str) -> None:
        if any(d.node == node for d in self.w.devices.values()):
            self.w.lose(NodeId(node))
        else:
            self.w.join(*node_devices(node, 2))

    @rule(model=st.sampled_from(["a", "b"]), pinned=st.booleans())
    def pin(self, model: str, pinned: bool) -> None:
        name = ModelName(model)
        if name in self.w.specs:
            (self.w.pinned.add if pinned else self.w.pinned.discard)(name)
            self.w.send(PinChanged(name, pinned))

    @rule(model=st.sampled_from(MODELS), load=st.booleans())
    def operator(self, model: ModelName, load: bool) -> None:
        if not load:
            self.w.pinned.discard(model)
        self.w.send(OperatorLoad(model) if load else OperatorUnload(model))

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        if self.w.devices:
            device = data.draw(st.sampled_from(sorted(self.w.devices)))
            on = device not in self.w.drained
            (self.w.drained.add if on else self.w.drained.discard)(device)
            self.w.send(OperatorDrain((device,), on))

    @rule(model=st.sampled_from(MODELS))
    def edit_catalog(self, model: ModelName) -> None:
        if model in self.w.specs:
            del self.w.specs[model]
            self.w.pinned.discard(model)
            self.w.send(CatalogChanged(removed=(model,)))
        else:
            spec = next(m for m in CATALOG if m.name == model)
            self.w.specs[model] = spec
            self.w.send(CatalogChanged((spec,)))

    @rule()
    def look(self) -> None:
        before = len(self.w.log)
        assert view(self.w.scheduler, self.w.now).at_s == self.w.now
        plan(self.w.scheduler, self.w.now)
        assert len(self.w.log) == before

    @invariant()
    def books_agree(self) -> None:
        self.w.check()

    def teardown(self) -> None:
        """Loads succeed from now on: devices that are to be empty become so. Then all are in service and nothing is
        pinned: every request is answered within its starvation bound."""
        for _ in range(4 * 60):
            if not any(self.w.drained & set(i.devices) for i in self.w.live.values()):
                break
            self.w.pass_time(0.25)
            self.w.step()
        assert not any(self.w.drained & set(i.devices) for i in self.w.live.values()), "a drain that never ends"
        for model in list(self.w.pinned):
            self.w.pinned.discard(model)
            self.w.send(PinChanged(model, False))
        for device in list(self.w.drained):
            self.w.drained.discard(device)
            self.w.send(OperatorDrain((device,), False))
        for node in ("n0", "n1"):
            if not any(d.node == node for d in self.w.devices.values()):
                self.w.join(*node_devices(node, 2))
        longest_s = max(m.max_wait_s for m in CATALOG) + self.policy.failure_backoff_max_s
        end = self.w.now + longest_s + 10.0
        while self.w.now < end and (self.w.inactive or any(i.running for i in self.w.live.values())):
            self.w.pass_time(0.25)
            self.w.step()
        self.w.check()
        assert not self.w.inactive, "a request waits for ever"


def machine(policy: ClusterSettings, examples: int) -> type:
    """A test case for one set of policy settings."""
    made: Any = type("Machine", (ClusterMachine,), {"policy": policy})
    made.TestCase.settings = settings(max_examples=examples * SOAK, stateful_step_count=40, deadline=None)
    case: type = made.TestCase
    return case


TestPrism = machine(ClusterSettings(rebalance_every_s=2.0, planning_window_s=3.0), 60)
TestByWork = machine(ClusterSettings(placement=Placement.GOODPUT, rebalance_every_s=2.0, planning_window_s=3.0), 15)
TestPaper = machine(
    ClusterSettings(
        placement=Placement.KVPR,
        kvpr=KvprMode.PAPER,
        eviction=EvictionOrder.PAPER,
        migration=MigrationTest.PAPER,
        rebalance_every_s=2.0,
        planning_window_s=3.0,
    ),
    25,
)
TestWithoutGlobalScheduler = machine(ClusterSettings(global_scheduler=False), 25)
TestWithoutElasticMemory = machine(ClusterSettings(elastic_memory=False), 25)
TestStatic = machine(ClusterSettings(policy=PolicyName.STATIC), 25)
TestMuxServe = machine(ClusterSettings(policy=PolicyName.MUXSERVE), 25)
TestQlm = machine(ClusterSettings(policy=PolicyName.QLM), 25)
TestServerless = machine(ClusterSettings(policy=PolicyName.SERVERLESSLLM, max_replicas=3, concurrency_target=2), 25)
