"""A world that carries out the cluster scheduler's effects honestly and checks what must always hold.

Weights occupy a device from ``Activate`` until the instance is gone. Requests stand in the inactive queue of their
model, or at the rank-0 device of an instance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.core.effects import Activate, ClusterEffect, Deactivate, RefuseWaiting, Route
from prism.core.events import (
    ActivationError,
    ActivationFailed,
    ActivationFinished,
    Arrivals,
    ClusterEvent,
    DeactivationFinished,
    DeviceReport,
    InstanceLoad,
    NodeJoined,
    NodeLost,
    Tick,
    WaitingRequests,
)
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings
from prism.core.specs import DeviceSpec, ModelShape, ModelSpec
from prism.scheduler import cluster_scheduler
from tests.scheduler.exchange import exchange

SHAPE = ModelShape(0, 64, 4, 2, 16, 128, 100)  # no layers: its KV costs nothing, min_kv_bytes counts
EVICTIONS = {ReasonCode.MAKE_ROOM, ReasonCode.STARVATION, ReasonCode.KEEP_ALIVE, ReasonCode.SWAP}


def model_spec(name: str, weight: int, tp: int = 1, **more: object) -> ModelSpec:
    """A catalog entry with sizes in the world's own bytes (devices have 1000)."""
    defaults: dict[str, object] = {"slo_ttft_s": 1.0, "slo_tpot_s": 0.1, "min_kv_bytes": 50, "max_wait_s": 20.0}
    return ModelSpec(
        name=ModelName(name), path=name, weight_bytes=weight, shape=SHAPE, context_tokens=100, tp=tp,
        **{**defaults, **more},  # type: ignore[arg-type]
    )  # fmt: skip


def _split(requests: int) -> tuple[int, int]:
    """(running, waiting): an instance runs four requests at once."""
    return min(4, requests), max(0, requests - 4)


@dataclass
class Live:
    """An instance as its owner has it."""

    devices: tuple[DeviceId, ...]
    weight: int
    state: str
    since_s: float
    running: list[float] = field(default_factory=list)
    """Arrival times of the requests there."""
    ahead: bool = False
    """Loaded before anybody asked."""
    served: int = 0
    used_s: float = 0.0
    """When it was activated, or its last request was served."""


class World:
    """The fleet's side of the protocol."""

    def __init__(self, settings: ClusterSettings, catalog: list[ModelSpec]) -> None:
        self.settings = settings
        self.specs = {s.name: s for s in catalog}
        self.scheduler = cluster_scheduler(settings, catalog)
        self.now = 0.0
        self.devices: dict[DeviceId, DeviceSpec] = {}
        self.drained: set[DeviceId] = set()
        self.pinned = {s.name for s in catalog if s.pinned}
        self.live: dict[InstanceKey, Live] = {}
        self.ever: set[InstanceKey] = set()
        self.inactive: dict[ModelName, list[float]] = {}
        self.routes: dict[ModelName, tuple[DeviceId, ...]] = {}
        self.finished = 0
        self.refused = 0
        self.arrived = 0
        self.activations = 0
        self.migrations = 0
        self.log: list[tuple[float, ClusterEffect]] = []

    # --- events in, effects out ---

    def send(self, event: ClusterEvent) -> None:
        exchange(self.scheduler, [event], self.now, self._logged)
        wake_s = self.scheduler.wake_s
        assert wake_s is None or wake_s > self.now, f"would spin after {event}"

    def _logged(self, effect: ClusterEffect) -> list[ClusterEvent]:
        self.log.append((self.now, effect))
        return self.do(effect)

    def do(self, effect: ClusterEffect) -> list[ClusterEvent]:
        match effect:
            case Activate():
                self._activate(effect)
            case Deactivate():
                return self._deactivate(effect)
            case Route(model, devices):
                return self._route(model, devices)
            case RefuseWaiting():
                return self._refuse(effect)
        return []

    def _activate(self, effect: Activate) -> None:
        key = effect.key
        spec = self.specs[effect.model]
        assert key not in self.ever, "a generation was used twice"
        self.ever.add(key)
        assert len(set(effect.devices)) == spec.tp
        assert len({self.devices[d].node for d in effect.devices}) == 1
        assert not self.drained & set(effect.devices), "placed on a device that is being drained"
        here = [i for k, i in self.live.items() if k[0] == effect.model and i.state != "draining"]
        assert len(here) < max(2, self.settings.max_replicas), "too many instances"
        self.migrations += effect.reason.code is ReasonCode.MIGRATION
        self.activations += 1
        ahead = effect.reason.code is ReasonCode.PREWARM
        self.live[key] = Live(effect.devices, spec.shard_weight_bytes, "loading", self.now, ahead=ahead)
        for device in effect.devices:
            spec_of = self.devices[device]
            assert self.weights_on(device) <= spec_of.memory_bytes, "over the device's capacity"
            engines = sum(device in i.devices for i in self.live.values())
            assert not spec_of.max_engines or engines <= spec_of.max_engines, "more engines than the device may have"

    def weights_on(self, device: DeviceId) -> int:
        return sum(i.weight for i in self.live.values() if device in i.devices)

    def _deactivate(self, effect: Deactivate) -> list[ClusterEvent]:
        key = effect.key
        instance = self.live[key]
        assert instance.devices == effect.devices
        code = effect.reason.code
        hurried = instance.state == "draining" and effect.carry
        assert instance.state != "draining" or hurried, "told to leave twice"
        if code in EVICTIONS and not hurried:
            assert effect.model not in self.pinned, "a pinned model was evicted"
            assert instance.state == "ready" and not self.inactive.get(effect.model)
            rested = self.now - instance.since_s >= self.settings.min_residency_s
            used = instance.served or instance.running or instance.ahead
            assert used or rested, "evicted before it served those that waited for it"
        if code is ReasonCode.MAKE_ROOM:
            assert not instance.running, "a model with requests was evicted as idle"
        instance.state = "draining"
        if not effect.carry:
            return []
        back, instance.running = instance.running, []
        return self._to_inactive(effect.model, back)

    def _route(self, model: ModelName, devices: tuple[DeviceId, ...]) -> list[ClusterEvent]:
        active = [i for k, i in self.live.items() if k[0] == model and i.state == "ready"]
        assert set(devices) <= {i.devices[0] for i in active}, "a route to where the model does not serve"
        self.routes[model] = devices
        if not devices or not self.inactive.get(model):
            return []
        targets = [i for i in active if i.devices[0] in devices]
        for place, arrival in enumerate(self.inactive.pop(model)):
            targets[place % len(targets)].running.append(arrival)
        return [WaitingRequests(model, 0, 0.0)]

    def _refuse(self, effect: RefuseWaiting) -> list[ClusterEvent]:
        waiting = self.inactive.pop(effect.model, [])
        keep = waiting[: effect.keep] if effect.keep else []
        if effect.arrived_before_s is not None:
            keep = [a for a in waiting if a > effect.arrived_before_s]
        assert len(keep) < len(waiting), "a refusal without effect"
        self.refused += len(waiting) - len(keep)
        return self._to_inactive(effect.model, keep, True)

    def _to_inactive(self, model: ModelName, arrivals: list[float], report: bool = False) -> list[ClusterEvent]:
        if not arrivals:
            return [WaitingRequests(model, 0, 0.0)] if report else []
        self.inactive[model] = sorted(self.inactive.get(model, []) + arrivals)
        return [WaitingRequests(model, len(self.inactive[model]), self.inactive[model][0])]

    # --- what happens in the world ---

    def join(self, *devices: DeviceSpec) -> None:
        self.devices.update({d.id: d for d in devices})
        self.send(NodeJoined(devices[0].node, devices))

    def lose(self, node: NodeId) -> None:
        gone = {d for d, s in self.devices.items() if s.node == node}
        events: list[ClusterEvent] = [NodeLost(node)]
        for key, instance in list(self.live.items()):
            if gone & set(instance.devices):
                del self.live[key]
                events += self._to_inactive(key[0], instance.running)
        for device in gone:
            del self.devices[device]
        self.drained -= gone
        for event in events:
            self.send(event)

    def arrive(self, model: ModelName, count: int = 1) -> None:
        self.arrived += count
        self.send(Arrivals(model, count))
        active = [i for k, i in self.live.items() if k[0] == model and i.state == "ready"]
        serving = [i for i in active if i.devices[0] in self.routes.get(model, ())]
        if serving:
            for place in range(count):
                serving[place % len(serving)].running.append(self.now)
        else:
            for event in self._to_inactive(model, [self.now] * count):
                self.send(event)

    def activated(self, key: InstanceKey, seconds: float = 0.5) -> None:
        instance = self.live[key]
        if instance.state == "loading":
            instance.state, instance.since_s, instance.used_s = "ready", self.now, self.now
            self.send(ActivationFinished(key, seconds))

    def failed(self, key: InstanceKey, error: ActivationError) -> None:
        del self.live[key]
        self.send(ActivationFailed(key, error))

    def gone(self, key: InstanceKey) -> None:
        """A drain ends once nothing runs; what is left in the queue goes back."""
        instance = self.live.pop(key)
        self.finished += len(instance.running)
        self.send(DeactivationFinished(key))

    def serve(self, key: InstanceKey) -> None:
        instance = self.live[key]
        self.finished += len(instance.running)
        instance.served += len(instance.running)
        instance.used_s = self.now if instance.running else instance.used_s
        instance.running = []

    def report(self, device: DeviceId) -> None:
        loads = tuple(
            InstanceLoad(k, i.weight, 10, 0 if i.running else 10, *_split(len(i.running)), i.served,
                      0.0 if i.running else self.now - i.used_s)
            for k, i in self.live.items()
            if device in i.devices and i.state != "loading"
        )  # fmt: skip
        capacity = self.devices[device].memory_bytes
        self.send(DeviceReport(device, capacity, capacity - self.weights_on(device), loads))

    def pass_time(self, seconds: float) -> None:
        """Time passes, with a tick wherever the scheduler asked for one."""
        end = self.now + seconds
        while (wake_s := self.scheduler.wake_s) is not None and wake_s <= end:
            self.now = max(self.now, wake_s)
            self.send(Tick())
        self.now = end

    def step(self, activation_s: float = 0.5) -> None:
        """One honest round: loads end, drains end, requests are served, devices report."""
        for key, instance in list(self.live.items()):
            if key not in self.live:
                continue
            if instance.state == "loading" and self.now - instance.since_s >= activation_s:
                self.activated(key)
            elif instance.state == "draining":
                self.gone(key)
            elif instance.state == "ready":
                self.serve(key)
        for device in list(self.devices):
            self.report(device)

    def check(self) -> None:
        """Both sides have the same books."""
        for key, instance in self.live.items():
            known = self.scheduler.books.loaded[key]
            assert known.devices == instance.devices
            assert instance.state == known.state
        models = self.scheduler.books.models.values()
        assert self.scheduler.books.several == {m.name for m in models if len(m.instances) > 1}
        books = self.scheduler.books
        assert set(books.fleet.idle) == {i.key for i in books.loaded.values() if i.idle_since_s is not None}
        for id, device in books.fleet.devices.items():
            site = books.times.site_of(id)
            for known in device.instances.values():
                known.tenant = None
            assert books.times.site_of(id) == site, "a tenant of other numbers"
        in_flight = sum(len(i.running) for i in self.live.values())
        waiting = sum(len(w) for w in self.inactive.values())
        assert self.arrived == self.finished + self.refused + in_flight + waiting, "a request was lost"
        board, fleet = self.scheduler.books.fleet.board, self.scheduler.books.fleet
        for device, index in fleet.index.items():
            shards = [i.shards[device] for i in fleet.devices[device].instances.values()]
            assert board.shared[index] == self.devices[device].memory_bytes - sum(s.weight_bytes for s in shards)
            assert abs(board.rate[index] - sum(s.weighted_rate for s in shards)) < 1e-6
