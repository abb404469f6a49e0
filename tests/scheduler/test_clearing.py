"""Idle models leave for further instances of one whose requests wait, and for no other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest

from prism.core.effects import Activate, Deactivate
from prism.core.events import DeviceReport, InstanceLoad, OperatorLoad
from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.test_relief import GB, HERE, SETTINGS, THERE, gpu

BURSTING, OLD, NEW = (ModelName(name) for name in ("bursting", "old", "new"))
COMES, LEAVES = ("bursting", ReasonCode.SCALE_OUT), ("old", ReasonCode.MAKE_ROOM)


@dataclass(frozen=True)
class Scene:
    """One device has a model with a burst, another one is full of two idle models."""

    waited_s: float = 5.0
    """The burst's requests."""
    ttft_s: float = 1.0
    """Their objective."""
    begun: int = 0
    """So many of them between two reports."""
    idle_s: float = 60.0
    """How long the idle ones have had nothing to do, the old one a second longer."""
    asked: int = 1
    """Requests of each idle one, every half second of twenty, before that."""
    short_s: float = 0.0
    """Requests have been waiting for memory where they are."""
    pinned: bool = False
    burst_gb: int = 16


def played(scene: Scene) -> World:
    w = World(
        replace(SETTINGS, rebalance_every_s=0.0, max_replicas=2),
        [
            model_spec(BURSTING, scene.burst_gb * GB, min_kv_bytes=GB, slo_ttft_s=scene.ttft_s),
            *(model_spec(name, 16 * GB, min_kv_bytes=GB, pinned=scene.pinned) for name in (OLD, NEW)),
        ],
    )
    for device, names in ((THERE, (OLD, NEW)), (HERE, (BURSTING,))):
        w.join(gpu(device, 40))
        for name in names:
            w.send(OperatorLoad(name, (device,)))
            w.pass_time(0.6)
            w.step()
    keys = {key.model: key for key in w.live}

    def load(name: ModelName, running: int, waiting: int = 0, idle_s: float = 0.0, served: int = 9) -> InstanceLoad:
        waited_s = scene.waited_s if waiting else 0.0
        kv_bytes = running * GB // 10
        weight_bytes = w.specs[name].weight_bytes
        return InstanceLoad(
            keys[name], weight_bytes, kv_bytes, 0, running, waiting, served, waited_s=waited_s, idle_s=idle_s
        )

    reports = itertools.count()

    def bursting(running: int, waiting: int) -> None:
        served = 9 + scene.begun * next(reports)
        w.send(DeviceReport(HERE, 40 * GB, 0, (load(BURSTING, running, waiting, served=served),)))

    for _ in range(40):
        w.arrive(BURSTING)
        for name in (OLD, NEW):
            w.arrive(name, scene.asked)
        bursting(4, 0)
        w.send(DeviceReport(THERE, 40 * GB, 0, tuple(load(name, 1) for name in (OLD, NEW))))
        w.pass_time(0.5)
    w.pass_time(scene.idle_s)
    idle = (load(OLD, 0, idle_s=scene.idle_s + 1.0), load(NEW, 0, idle_s=scene.idle_s))
    for key in w.live:
        if key.model != BURSTING:
            w.serve(key)
    w.send(DeviceReport(THERE, 40 * GB, 0, idle, memory_short_s=scene.short_s))
    w.log.clear()
    for _ in range(4):
        w.arrive(BURSTING, 20)
        bursting(12, 4)
        w.pass_time(0.1)
    return w


def changes(w: World) -> list[tuple[str, ReasonCode]]:
    """Who came since the burst began, and who left."""
    return [(e.key.model, e.reason.code) for _, e in w.log if isinstance(e, Activate | Deactivate)]


def test_an_idle_model_leaves_for_requests_that_wait_and_no_more_of_them_than_needed() -> None:
    w = played(Scene())
    assert changes(w) == [LEAVES], "the further instance waits until the idle one is gone"
    w.gone(next(key for key in w.live if key.model == OLD))
    assert changes(w) == [LEAVES, COMES]
    assert [i.devices for key, i in w.live.items() if key.model == BURSTING] == [(HERE,), (THERE,)]
    w.check()


@pytest.mark.parametrize(
    "scene",
    [
        Scene(waited_s=0.01),
        Scene(waited_s=30.0, ttft_s=100.0, begun=1),
        Scene(idle_s=0.1),
        Scene(asked=400, idle_s=10.0),
        Scene(short_s=2.0),
        Scene(pinned=True),
        Scene(burst_gb=39),
    ],
    ids=[
        "nobody waits for long",
        "all will be begun in time",
        "they have hardly been idle",
        "they are asked more than the burst",
        "requests wait for memory there",
        "pinned",
        "there is no room without both",
    ],
)
def test_else_all_stay(scene: Scene) -> None:
    assert changes(played(scene)) == []
