"""Small worlds for rules one by one: a few models on a device or two."""

from __future__ import annotations

from prism.core.effects import Route
from prism.core.events import Arrivals, DeviceReport, InstanceLoad
from prism.core.ids import DeviceId, ModelName
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelSpec
from tests.scheduler.cluster_world import World
from tests.scheduler.exchange import node_devices

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
GB0, GB1 = DeviceId("n/host:0"), DeviceId("n/host:1")
QUIET = ClusterSettings(rebalance_every_s=0.0)


def world(*catalog: ModelSpec, devices: int = 1, settings: ClusterSettings = QUIET) -> World:
    w = World(settings, list(catalog))
    w.join(*node_devices("n", devices))
    return w


def serve(w: World, model: ModelName, count: int = 1) -> None:
    """``count`` requests for the model come and are answered."""
    w.arrive(model, count)
    w.pass_time(0.5)
    w.step()
    w.step()


def reasons(w: World, kind: type) -> list[tuple[str, ReasonCode]]:
    return [(e.model, e.reason.code) for _, e in w.log if isinstance(e, kind) and not isinstance(e, Route)]


def on(w: World, model: ModelName) -> tuple[DeviceId, ...]:
    return next(i.devices for k, i in w.live.items() if k[0] == model and i.state == "ready")


def report_load(w: World, model: ModelName, running: int, waiting: int) -> None:
    """One second in which the model's requests fill its instances and ``waiting`` more wait at each."""
    w.pass_time(1.0)
    w.send(Arrivals(model, 4))
    for key, instance in list(w.live.items()):
        if instance.state == "ready" and key[0] == model:
            load = InstanceLoad(key, 300, 100, 0, running, waiting, 9, waited_s=1.0 if waiting else 0.0)
            w.send(DeviceReport(instance.devices[0], 1000, 500, (load,)))
