"""The live system and the simulator tell their schedulers the same, on the same small script: two requests, one that is
lost with its engine and goes on where it was, and a model that is told to leave.

Event by event and field by field, for the cluster's scheduler and for those of the devices (of which one is used at a
time). What says how fast, how large or where something is, and when it happened, need not be equal (:data:`MEASURED`),
only be there in both or in neither. Reports come in their own rhythm: the last of each kind counts, when all is quiet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prism.core.device_events import EngineLoad, MemoryReport
from prism.core.events import (
    ActivationFinished,
    Arrivals,
    CatalogChanged,
    DeactivationFinished,
    DeviceReport,
    FleetKnown,
    InstanceLost,
    NodeJoined,
    OperatorUnload,
    Tick,
    WaitingRequests,
)
from prism.core.ids import ModelName, NodeId
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.cluster_file import parse_cluster
from prism.sim.job import Job
from prism.sim.recorder import RunRecorder
from prism.sim.world import World
from tests.patience import happens

from .fake_system import SPEED, ended, fake_system, model, some_tokens

A = ModelName("a")
LONG_TOKENS = 2000
REPORTS = (DeviceReport, EngineLoad, MemoryReport)
RHYTHM = (Arrivals, WaitingRequests, CatalogChanged, Tick, FleetKnown)
"""Told when the controller looks, so that several may become one; or not at all, since simulated catalogs stay and
nobody takes over there."""
CLUSTER, DEVICES = "the cluster's scheduler", "the devices' schedulers"
MEASURED = {
    "arrival_s",
    "capacity_bytes",
    "device",
    "domain",
    "free_bytes",
    "free_kv_tokens",
    "generated_tokens",
    "idle_s",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_page_bytes",
    "max_request_tokens",
    "memory_bytes",
    "oldest_arrival_s",
    "page_bytes",
    "prefill_tokens_per_s",
    "seconds",
    "tightest_deadline_s",
    "token_s",
    "waited_s",
    "weight_bytes",
    "weight_page_bytes",
}


@dataclass
class Told:
    """What the schedulers of one world were told."""

    events: dict[str, list[Any]] = field(default_factory=lambda: {CLUSTER: [], DEVICES: []})

    def listen(self, who: str, scheduler: Any) -> None:
        """Notes what ``scheduler`` is told from now on."""
        hear: Callable[[Any, float], Any] = scheduler.on_event
        noted = self.events[who]

        def on_event(event: Any, now_s: float) -> Any:
            noted.append(event)
            return hear(event, now_s)

        def take_loads(loads: Iterable[EngineLoad], memory: MemoryReport, now_s: float) -> None:
            all_at_once = list(loads)
            noted.extend([*all_at_once, memory])
            scheduler_takes(all_at_once, memory, now_s)

        scheduler.on_event = on_event
        if who == DEVICES:
            scheduler_takes, scheduler.take_loads = scheduler.take_loads, take_loads

    def story(self, who: str) -> list[object]:
        """Everything but reports and what is told when somebody looks."""
        return [_comparable(e) for e in self.events[who] if not isinstance(e, (*REPORTS, *RHYTHM))]

    def last(self, who: str, kind: type, number: int = -1) -> object:
        return _comparable([e for e in self.events[who] if isinstance(e, kind)][number])

    def last_report_of_use(self) -> object:
        """The last one of an instance that has served."""
        reports = [e for e in self.events[CLUSTER] if isinstance(e, DeviceReport)]
        return _comparable([e for e in reports if any(load.served for load in e.instances)][-1])


def _comparable(value: Any, name: str = "") -> object:
    """``value`` with its fields by name, names of this run's requests and nodes as they would be anywhere."""
    if name in MEASURED:
        return type(value).__name__ if isinstance(value, str) or 0 <= value < float("inf") else value
    if is_dataclass(value) and not isinstance(value, type | ModelSpec):
        own = [f.name for f in fields(value) if f.compare]  # the others follow from these
        return type(value).__name__, {field: _comparable(getattr(value, field), field) for field in own}
    if hasattr(value, "_asdict"):
        return type(value).__name__, {name: _comparable(item, name) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, str) and name == "id" and value.startswith("r"):
        return "request"
    return value.replace("node0", "local") if isinstance(value, str) else value


async def live_story(folder: Path) -> Told:
    async with fake_system(folder, [model(A)]) as system:
        told = Told()
        told.listen(CLUSTER, system.controller.scheduler)
        for shell in system.agents[0].shells.values():
            told.listen(DEVICES, shell.scheduler)
        await happens(system.controller.nodes.all, "the node's first report")
        for _ in range(2):
            await ended(await system.front.ask(A))
            await system.empty()
        lost = await system.front.ask(A, LONG_TOKENS)
        await some_tokens([lost])
        system.engines(A)[0].kill()
        await ended(lost)
        await system.empty()
        await _quiet(told)
        system.controller.feed(OperatorUnload(A))
        await happens(lambda: not system.engines(A), "the model's leaving")
        await happens(lambda: _kinds(told)[-1:] == ["DeactivationFinished"], "the word of it")
        return told


async def _quiet(told: Told) -> None:
    """Waits for a report that nothing runs any more."""

    def idle() -> bool:
        reports = [e for e in told.events[CLUSTER] if isinstance(e, DeviceReport) and e.instances]
        return bool(reports) and reports[-1].instances[0].served > 0 and reports[-1].instances[0].running == 0

    await happens(idle, "a report of an idle model")


def _kinds(told: Told) -> list[str]:
    return [type(e).__name__ for e in told.events[CLUSTER] if not isinstance(e, (*REPORTS, *RHYTHM))]


def simulated_story() -> Told:
    group = {"gpu": "cpu", "nodes": 1, "gpus_per_node": 2, "memory": "100MiB"}
    timing = {"relayout": "120ms", "ready": "80ms"}  # as CPU devices take
    data = {"groups": [group], "engine": {"max_running": SPEED.max_running}, "timing": timing}
    cluster = parse_cluster(data, "test")
    spec, told = model(A), Told()
    world = World(cluster, [spec], PolicySettings(), RunRecorder(0.0))
    told.listen(CLUSTER, world.control.scheduler)
    for device in world.devices.values():
        told.listen(DEVICES, device.scheduler)
    world.join()
    jobs = [Job(i, spec, 1.0 + 10.0 * i, 3, LONG_TOKENS if i == 2 else 20) for i in range(3)]
    world.queue.after(21.2, lambda _: world.nodes.lose_instance(next(iter(world.nodes.instances))))
    for _ in world.run(iter(jobs)):
        pass
    world.queue.run_until(world.queue.now_s + 10.0)
    world.control.tell(OperatorUnload(A))
    world.queue.run_until(world.queue.now_s + 10.0)
    assert [r.error for r in world.recorder.records] == ["", "", ""]
    return told


@pytest.fixture
async def worlds(tmp_path: Path) -> tuple[Told, Told]:
    """The live one and the simulated one, when the script is over."""
    return await live_story(tmp_path), await asyncio.to_thread(simulated_story)


async def test_both_worlds_tell_their_schedulers_the_same(worlds: tuple[Told, Told]) -> None:
    live, simulated = worlds
    for who in (CLUSTER, DEVICES):
        assert simulated.story(who) == live.story(who), f"to {who}"
    for kind in (EngineLoad, MemoryReport):
        assert simulated.last(DEVICES, kind) == live.last(DEVICES, kind)
    for number in (0, -1):
        assert simulated.last(CLUSTER, WaitingRequests, number) == live.last(CLUSTER, WaitingRequests, number)
    assert simulated.last_report_of_use() == live.last_report_of_use()


async def test_the_word_about_an_instance_comes_with_the_numbers_in_both(worlds: tuple[Told, Told]) -> None:
    for told in worlds:
        events = [e for e in told.events[CLUSTER] if not isinstance(e, RHYTHM)]
        for event, after in pairwise(events):
            if isinstance(after, ActivationFinished | DeactivationFinished):
                assert isinstance(event, DeviceReport)
            if isinstance(event, InstanceLost):
                assert isinstance(after, DeviceReport)


def test_the_comparison_sees_every_field() -> None:
    one, other = NodeJoined(NodeId("local"), ()), NodeJoined(NodeId("other"), ())
    assert _comparable(one) == _comparable(NodeJoined(NodeId("node0"), ())) != _comparable(other)
    assert _comparable(WaitingRequests(A, 0, 0.0)) != _comparable(WaitingRequests(A, 0, float("inf")))
