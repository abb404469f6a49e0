"""The agent tells a device's engines who stands still."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from prism.core.device_events import EngineDown, EngineUp, Finished, FirstToken, MemoryReport, RequestArrived
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import DeviceKind, DeviceRates
from prism.node.holding import HELD_S, HeldSteps
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.gpu_pauses import LOOK_EVERY_S
from tests.patience import happens

RATES = DeviceRates(3e-3, 0.0, 1e12)
DEVICE = DeviceId("n/cuda:0")


@dataclass
class HeldHandle:
    told: list[float] = field(default_factory=list)

    def hold(self, for_s: float) -> None:
        self.told.append(for_s)


class ThreeEngines:
    """Each takes 0.7 of the bandwidth and answers one request since 0 s, with 2.04 times its time alone."""

    def __init__(self, longest_s: float = 0.3) -> None:
        settings = GpuSettings(Admission.GREEDY, longest_pause_s=longest_s)
        self.scheduler = GpuScheduler(DEVICE, settings, DeviceKind.CUDA)
        self.scheduler.on_event(MemoryReport(10**12), 0.0)
        self.keys = [InstanceKey(ModelName(f"m{i}"), Generation(i + 1)) for i in range(3)]
        self.handles = {key: HeldHandle() for key in self.keys}
        self.metrics = Metrics()
        self.now_s = 1.0
        measures = NodeMeasures(self.metrics, [])
        self.held = HeldSteps(self.scheduler, self.handles, measures, lambda: self.now_s)  # type: ignore[arg-type]
        for i, key in enumerate(self.keys):
            up = EngineUp(key, 1e4, 1, 64, weight_bytes=7 * 10**9, slo_tpot_s=0.0204, rates=RATES)
            self.scheduler.on_event(up, 0.0)
            self.scheduler.on_event(RequestArrived(Request(RequestId(f"r{i}"), key.model, 0.0, 1, 1.0, 60.0)), 0.0)
            self.scheduler.on_event(FirstToken(RequestId(f"r{i}")), 0.0)
            self.held.begin(self.handles[key])  # type: ignore[arg-type]

    def tell(self, *tokens: int) -> None:
        for i, (key, count) in enumerate(zip(self.keys, tokens, strict=True)):
            self.held.told(key, {f"r{i}": count})

    def told(self) -> list[list[float]]:
        found = [list(handle.told) for handle in self.handles.values()]
        for handle in self.handles.values():
            handle.told.clear()
        return found

    def held_seconds(self) -> float:
        value = self.metrics.registry.get_sample_value("prism_held_seconds_total", {"model": "m2", "device": DEVICE})
        return value or 0.0


def test_engines_are_asked_for_their_answers_only_where_anybody_may_stand_still() -> None:
    assert ThreeEngines().told() == [[0.0]] * 3
    assert ThreeEngines(longest_s=0.0).told() == [[]] * 3


def test_who_stands_still_is_told_again_at_every_look_and_goes_on_when_it_is_not_needed_any_more() -> None:
    three = ThreeEngines()
    three.told()
    three.tell(49, 49, 70)
    three.held.look()
    assert three.told() == [[], [], [HELD_S]]
    three.now_s += LOOK_EVERY_S
    three.held.look()
    assert three.told() == [[], [], [HELD_S]]
    three.scheduler.on_event(Finished(RequestId("r0")), three.now_s)
    three.held.look()
    assert three.told() == [[], [], [0.0]]
    assert three.held_seconds() == pytest.approx(LOOK_EVERY_S)


def test_an_engine_that_says_nothing_and_one_that_is_gone_are_not_told() -> None:
    three = ThreeEngines()
    three.told()
    three.held.look()
    assert three.told() == [[], [], []]
    three.tell(49, 49, 70)
    three.held.look()
    three.told()
    del three.handles[three.keys[2]]
    three.scheduler.on_event(EngineDown(three.keys[2]), three.now_s)
    three.held.end(three.keys[2])
    three.held.look()
    assert three.told() == [[], []]


async def test_it_looks_when_an_answer_begins_or_ends_and_ends_where_nobody_stands_still() -> None:
    three = ThreeEngines()
    three.told()
    three.tell(49, 49, 70)
    task = asyncio.create_task(three.held.run())
    three.held.changed()
    await happens(lambda: three.handles[three.keys[2]].told, "what the answers make of it")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await ThreeEngines(longest_s=0.0).held.run()
