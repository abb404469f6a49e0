"""Golden decision logs: a small trace gives the same bytes for every policy. ``PRISM_UPDATE_GOLDEN=1`` writes them
anew; the difference is then read and committed with the change that made it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prism.core.device_events import EngineUp, Finished, FirstToken, MemoryReport, RequestArrived
from prism.core.effects import Dispatch, decision_line
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import (
    Admission,
    ClusterSettings,
    EvictionOrder,
    GpuSettings,
    KvprMode,
    MigrationTest,
    Placement,
    PolicyName,
)
from prism.scheduler.gpu import GpuScheduler
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices

GOLDEN = Path(__file__).parent / "golden"

CATALOG = [
    model_spec("chat", 300, slo_ttft_s=0.5),
    model_spec("code", 350, slo_ttft_s=1.0),
    model_spec("draft", 200, slo_ttft_s=3.0, keep_alive_s=6.0),
    model_spec("long", 700, slo_ttft_s=5.0),
    model_spec("wide", 800, tp=2, slo_ttft_s=4.0),
]
POLICIES = {
    "prism": ClusterSettings(rebalance_every_s=2.0, planning_window_s=4.0),
    "paper": ClusterSettings(
        placement=Placement.KVPR,
        kvpr=KvprMode.PAPER,
        eviction=EvictionOrder.PAPER,
        migration=MigrationTest.PAPER,
        rebalance_every_s=2.0,
        planning_window_s=4.0,
    ),
    "static": ClusterSettings(policy=PolicyName.STATIC),
    "muxserve": ClusterSettings(policy=PolicyName.MUXSERVE),
    "qlm": ClusterSettings(policy=PolicyName.QLM),
}


def numbers(seed: int) -> Iterator[float]:
    """Uniform numbers in [0, 1) that are the same on every machine and Python version."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield (state >> 33) / 2**31


def compare(name: str, lines: list[str]) -> None:
    path = GOLDEN / f"{name}.jsonl"
    text = "".join(f"{line}\n" for line in lines)
    if os.environ.get("PRISM_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name}: decisions changed; PRISM_UPDATE_GOLDEN=1 writes the new ones"


@pytest.mark.parametrize("policy", list(POLICIES))
def test_cluster_decisions(policy: str) -> None:
    world = World(POLICIES[policy], CATALOG)
    world.join(*node_devices("n", 2))
    uniform = numbers(7)
    for second in range(60):
        for rank, spec in enumerate(CATALOG, 1):
            busy = (second // (5 * rank)) % 2 == 0
            if busy and next(uniform) < 0.8 / rank:
                world.arrive(spec.name, 1 + int(3 * next(uniform)))
        for _ in range(4):
            world.pass_time(0.25)
            world.step()
    world.check()
    compare(policy, [decision_line(effect, at_s) for at_s, effect in world.log])


@pytest.mark.parametrize("admission", list(Admission))
def test_dispatch_decisions(admission: Admission) -> None:
    scheduler = GpuScheduler(DeviceId("n/host:0"), GpuSettings(admission, 1000, decode_reserve_tokens=16))
    models = [ModelName("chat"), ModelName("long")]
    for generation, model in enumerate(models, 1):
        scheduler.on_event(EngineUp(InstanceKey(model, Generation(generation)), 2000.0, 1, 4, 1024), 0.0)
    scheduler.on_event(MemoryReport(6000), 0.0)
    uniform, lines, ends = numbers(3), [], []
    arrivals = []
    for i in range(120):
        long = next(uniform) < 0.3
        tokens = int((200 + 3000 * next(uniform)) if long else (20 + 300 * next(uniform)))
        slo_s = 4.0 if long else 0.6
        arrivals.append((0.25 * i * next(uniform), f"r{i:03}", models[long], tokens, slo_s))
    steps = sorted((at_s, 0, id, model, tokens, slo_s) for at_s, id, model, tokens, slo_s in arrivals)
    while steps:
        at_s, kind, id, model, tokens, slo_s = steps.pop(0)
        request = Request(RequestId(id), model, at_s, tokens, slo_s, 10.0, max_new_tokens=50)
        event = (RequestArrived(request), FirstToken(request.id), Finished(request.id))[kind]
        effects = scheduler.on_event(event, at_s)
        lines += [decision_line(effect, at_s) for effect in effects]
        for effect in effects:
            if isinstance(effect, Dispatch):
                prefill_s = next(a[3] for a in arrivals if a[1] == effect.id) / 2000.0
                ends.append(effect.id)
                steps += [
                    (at_s + prefill_s, 1, effect.id, model, 0, 0.0),
                    (at_s + prefill_s + 0.5, 2, effect.id, model, 0, 0.0),
                ]
        steps.sort()
    assert sorted(ends) == sorted(a[1] for a in arrivals)
    compare(f"gpu_{admission.value}", lines)
