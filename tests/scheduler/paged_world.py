"""A fleet with physical memory for the cluster scheduler: pages, KV that running requests hold, loads and answers that
take time, reports that are late. Ten models and closed-loop clients keep two devices that hold four of them busy.

Everything is drawn from one seeded generator; :meth:`PagedWorld.run` goes through hours in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
    Tick,
    WaitingRequests,
)
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.instances import InstanceKey
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelSpec
from prism.scheduler import cluster_scheduler
from tests.scheduler.exchange import exchange, node_devices

PAGE = 20
ROOM_WAIT_S = 5.0


@dataclass(frozen=True)
class Traffic:
    """Closed-loop clients: each asks, waits for the answer, thinks, asks again."""

    clients: int
    think_s: float
    answer_s: tuple[float, float]
    """Shortest and longest time to answer a request that runs."""
    weights: Callable[[float, int], Sequence[float]]
    """Chance of each of ``n`` models at a time."""


@dataclass(slots=True)
class Ask:
    """One request."""

    client: int
    model: ModelName
    asked_s: float
    left_s: float
    """Time that its answer still takes."""
    began_s: float | None = None
    waits_since_s: float = 0.0
    """Since when it has been in the inactive queue (again)."""


@dataclass
class Instance:
    """One copy of a model. A running request holds a page of KV beyond the first one, which all share."""

    devices: tuple[DeviceId, ...]
    pages: int
    state: str = "loading"
    queue: list[Ask] = field(default_factory=list)
    running: list[Ask] = field(default_factory=list)
    served: int = 0
    used_s: float = 0.0

    @property
    def held(self) -> int:
        return self.pages + max(1, len(self.running))


class PagedWorld:
    """The world; all waits for an activation are in :attr:`waits_s`."""

    def __init__(self, settings: ClusterSettings, catalog: Sequence[ModelSpec], memory: int, seed: int) -> None:
        self.specs = {s.name: s for s in catalog}
        self.scheduler = cluster_scheduler(settings, catalog)
        self.chance = random.Random(seed)
        self.now = 0.0
        self.memory_pages = memory // PAGE
        self.live: dict[InstanceKey, Instance] = {}
        self.inactive: dict[ModelName, list[Ask]] = {}
        self.routes: dict[ModelName, tuple[DeviceId, ...]] = {}
        self.waits_s: list[float] = []
        self.answered = self.refused = self.failures = self.carried = 0
        self.log: list[tuple[float, ClusterEffect]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._told: set[DeviceId] = set()
        devices = [replace(d, page_bytes=PAGE, weight_page_bytes=PAGE) for d in node_devices("n", 2, memory)]
        self.devices = [d.id for d in devices]
        self._short: dict[DeviceId, list[InstanceKey]] = {d: [] for d in self.devices}
        """Activations that wait for memory."""
        self.tell(NodeJoined(NodeId("n"), tuple(devices)))

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), call))

    def run(self, traffic: Traffic, until_s: float) -> None:
        for client in range(traffic.clients):
            self.at(self.chance.random(), lambda client=client: self._ask(client, traffic))  # type: ignore[misc]
        for device in self.devices:
            self._report(device)
        self._traffic = traffic
        while self.now < until_s:
            wake_s = self.scheduler.wake_s
            if wake_s is not None and wake_s <= self._events[0][0]:
                self.now = max(self.now, wake_s)
                self.tell(Tick())
            else:
                self.now, _, call = heapq.heappop(self._events)
                call()

    def tell(self, *events: ClusterEvent) -> None:
        exchange(self.scheduler, events, self.now, self._do)

    # --- clients ---

    def _ask(self, client: int, traffic: Traffic) -> None:
        names = list(self.specs)
        model = self.chance.choices(names, traffic.weights(self.now, len(names)))[0]
        ask = Ask(client, model, self.now, self.chance.uniform(*traffic.answer_s), waits_since_s=self.now)
        self.tell(Arrivals(model, 1))
        self._place(ask)

    def _answered(self, ask: Ask) -> None:
        think_s = self.chance.expovariate(1.0 / self._traffic.think_s)
        self.at(think_s, lambda: self._ask(ask.client, self._traffic))

    def _place(self, ask: Ask) -> None:
        for device in self.routes.get(ask.model, ()):
            key = next((k for k, i in self.live.items() if k[0] == ask.model and i.devices[0] == device), None)
            if key is not None and self.live[key].state == "ready":
                self.live[key].queue.append(ask)
                self._begin(device)
                return
        ask.waits_since_s = self.now
        self.inactive.setdefault(ask.model, []).append(ask)
        self.tell(self._state(ask.model))

    def _state(self, model: ModelName) -> WaitingRequests:
        waiting = self.inactive.get(model, [])
        if not waiting:
            return WaitingRequests(model, 0, float("inf"))
        oldest_s = min(a.asked_s for a in waiting)
        return WaitingRequests(model, len(waiting), oldest_s, len(waiting), oldest_s + self.specs[model].slo_ttft_s)

    # --- engines ---

    def free_pages(self, device: DeviceId) -> int:
        free = self.memory_pages - sum(i.held for i in self.live.values() if device in i.devices)
        assert free >= 0, "over the device's memory"
        return free

    def _begin(self, device: DeviceId) -> None:
        """Start what waits on the device as far as there is memory for its KV."""
        self._feed(device)
        for key, instance in self.live.items():
            while instance.devices[0] == device and instance.state == "ready" and instance.queue:
                if instance.running and (self._short[device] or self.free_pages(device) < 1):
                    break
                ask = instance.queue.pop(0)
                instance.running.append(ask)
                instance.served += 1
                ask.began_s = self.now
                self.at(ask.left_s, lambda key=key, ask=ask, at=self.now: self._finish(key, ask, at))  # type: ignore[misc]
        self._soon(device)

    def _finish(self, key: InstanceKey, ask: Ask, began_s: float) -> None:
        instance = self.live.get(key)
        if instance is None or ask not in instance.running or ask.began_s != began_s:
            return  # it was carried over
        instance.running.remove(ask)
        instance.used_s = self.now
        self.answered += 1
        self._answered(ask)
        self._begin(instance.devices[0])
        self._maybe_gone(key)

    def _maybe_gone(self, key: InstanceKey) -> None:
        instance = self.live[key]
        if instance.state == "draining" and not instance.running:
            self.at(self.chance.uniform(0.005, 0.05), lambda: self._gone(key))
            instance.state = "leaving"

    def _gone(self, key: InstanceKey) -> None:
        device = self.live.pop(key).devices[0]
        self.tell(DeactivationFinished(key))
        self._begin(device)

    def _loaded(self, key: InstanceKey, seconds: float) -> None:
        instance = self.live[key]
        if instance.state == "loading":
            instance.state, instance.used_s = "ready", self.now
            self.tell(ActivationFinished(key, seconds))
            self._soon(instance.devices[0])
        else:
            self._maybe_gone(key)

    # --- reports ---

    def _soon(self, device: DeviceId) -> None:
        if device not in self._told:
            self._told.add(device)
            self.at(0.02, lambda: self._tell_report(device))

    def _tell_report(self, device: DeviceId) -> None:
        self._told.discard(device)
        loads = tuple(
            InstanceLoad(k, i.pages * PAGE, max(1, len(i.running)) * PAGE, 0 if i.running else PAGE,
                      len(i.running), len(i.queue), i.served,
                      0.0 if i.running or i.queue else self.now - i.used_s)
            for k, i in self.live.items()
            if device in i.devices and i.state != "loading"
        )  # fmt: skip
        self.tell(DeviceReport(device, self.memory_pages * PAGE, self.free_pages(device) * PAGE, loads))

    def _report(self, device: DeviceId) -> None:
        self._tell_report(device)
        self.at(1.0, lambda: self._report(device))

    # --- effects ---

    def _do(self, effect: ClusterEffect) -> list[ClusterEvent]:
        self.log.append((self.now, effect))
        match effect:
            case Activate(key):
                return self._activate(key, effect.devices)
            case Deactivate(key, _, carry):
                return self._deactivate(key, carry)
            case Route(model, devices):
                return self._route(model, devices)
            case RefuseWaiting(model):
                gone = self.inactive.pop(model, [])
                self.refused += len(gone)
                for ask in gone:
                    self._answered(ask)
                return [self._state(model)]
        return []

    def _activate(self, key: InstanceKey, devices: tuple[DeviceId, ...]) -> list[ClusterEvent]:
        """An activation waits a while for memory that requests took between two reports; they get no more meanwhile."""
        self._short[devices[0]].append(key)
        self._feed(devices[0])
        if key in self._short[devices[0]]:
            self.at(ROOM_WAIT_S, lambda: self._give_up(key, devices[0]))
        return []

    def _feed(self, device: DeviceId) -> None:
        for key in list(self._short[device]):
            pages = -(-self.specs[key[0]].weight_bytes // PAGE)
            if self.free_pages(device) >= pages + 1:
                self._short[device].remove(key)
                self.live[key] = Instance((device,), pages)
                seconds = self.chance.uniform(0.08, 0.4)
                self.at(seconds, lambda key=key, seconds=seconds: self._loaded(key, seconds))  # type: ignore[misc]

    def _give_up(self, key: InstanceKey, device: DeviceId) -> None:
        if key in self._short[device]:
            self._short[device].remove(key)
            self.failures += 1
            self.tell(ActivationFailed(key, ActivationError.NO_MEMORY))

    def _deactivate(self, key: InstanceKey, carry: bool) -> list[ClusterEvent]:
        if key not in self.live:  # it still waits for its memory
            device = next(d for d, keys in self._short.items() if key in keys)
            self._short[device].remove(key)
            return [DeactivationFinished(key)]
        instance = self.live[key]
        back, instance.queue = instance.queue, []
        if carry and instance.state != "leaving":
            self.carried += len(instance.running)
            for ask in instance.running:
                assert ask.began_s is not None
                ask.left_s = max(0.01, ask.left_s - (self.now - ask.began_s))
            back, instance.running = back + instance.running, []
        if instance.state == "ready":
            instance.state = "draining"
        elif instance.state == "loading":
            instance.state = "draining"
            return []
        if instance.state == "draining":
            self._maybe_gone(key)
        for ask in back:
            self.at(0.01, lambda ask=ask: self._place(ask))  # type: ignore[misc]
        return []

    def _route(self, model: ModelName, devices: tuple[DeviceId, ...]) -> list[ClusterEvent]:
        self.routes[model] = devices
        if not devices or not self.inactive.get(model):
            return []
        for ask in self.inactive.pop(model):
            self.waits_s.append(self.now - ask.waits_since_s)
            self._place(ask)
        return [self._state(model)]
