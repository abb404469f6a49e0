"""What the cluster scheduler knows of models, instances and devices. Bookkeeping only: no decision is taken here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from prism.core.events import DeviceReport
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.core.reasons import Reason
from prism.core.specs import DeviceSpec, ModelSpec
from prism.core.views import InstanceState
from prism.policy.demand import IdleIntervals, SlidingRate
from prism.policy.pressure import Floats, Mask, PressureBoard, Shard


@dataclass(slots=True)
class Instance:
    """One copy of a model on its devices, from the promise of memory to the end of its deactivation."""

    model: ModelName
    generation: Generation
    devices: tuple[DeviceId, ...]
    shard: Shard
    """What each device carries for it; its rate changes with demand, and is 0 once it drains."""
    state: InstanceState
    since_s: float
    reason: Reason
    kv_cap_bytes: int | None = None
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    idle_s: float = 0.0
    """How long it had been idle in the last report that showed it so."""
    idle_since_s: float | None = None
    served: bool = False
    replaces: InstanceKey | None = None
    """The instance that leaves once this one serves (a migration)."""
    carried: bool = False
    """Draining, and told to move its running requests away."""
    waits_for: set[InstanceKey] = field(default_factory=set)
    """Instances whose memory it needs before its command can be sent."""

    @property
    def key(self) -> InstanceKey:
        return InstanceKey(self.model, self.generation)

    @property
    def busy(self) -> bool:
        return self.running > 0 or self.waiting > 0

    def enter(self, state: InstanceState, now_s: float) -> None:
        self.state, self.since_s = state, now_s


@dataclass(slots=True)
class ModelState:
    """One catalog entry with its demand and its instances."""

    spec: ModelSpec
    pinned: bool
    rate: SlidingRate
    idle: IdleIntervals = field(default_factory=IdleIntervals)
    instances: list[Instance] = field(default_factory=list)
    weighted_rate: float = 0.0
    """``r / s`` as the board has it."""
    last_arrival_s: float | None = None
    idle_since_s: float | None = None
    """When its last instance became idle; kept after that instance left."""
    waiting: int = 0
    waiting_since_s: float = float("inf")
    """When its inactive queue last began to fill: requests that were carried here may have arrived long before."""
    waiting_tokens: int = 0
    tightest_deadline_s: float = float("inf")
    refused_at_s: float = float("-inf")
    """When its waiting requests were refused; minus infinity again once the inactive queue has answered."""
    want: Reason | None = None
    """Why it should be loaded although nothing waits for it (pinned, operator, drain)."""
    wanted_devices: tuple[DeviceId, ...] = ()
    failures: int = 0
    stillborn: int = 0
    """Engines in a row that died by themselves before any request had a token of them."""
    retry_at_s: float = float("-inf")
    failure: str = ""
    failed_for_good: bool = False
    activation_s: float | None = None
    least_instances: int = 1
    """So many an operator asked for: they stay although demand does not need them (neighbours' demand may)."""
    avoid_until_s: dict[DeviceId, float] = field(default_factory=dict)
    short_bytes: dict[DeviceId, int] = field(default_factory=dict)
    """How much more than its size it is believed to need on a device whose memory turned out not to be there."""
    claims_again_s: float = float("-inf")
    """When it may look for devices to claim again."""
    removed: bool = False

    @property
    def name(self) -> ModelName:
        return self.spec.name

    def in_state(self, *states: InstanceState) -> list[Instance]:
        return [i for i in self.instances if i.state in states]

    @property
    def coming_or_here(self) -> bool:
        """Some instance serves or will."""
        return any(i.state is not InstanceState.DRAINING for i in self.instances)

    @property
    def resting_since_s(self) -> float | None:
        """Since when none of its active instances has had a request; None when one has."""
        latest_s: float | None = None
        for instance in self.instances:
            if instance.state is InstanceState.ACTIVE:
                if instance.idle_since_s is None:
                    return None
                latest_s = instance.idle_since_s if latest_s is None else max(latest_s, instance.idle_since_s)
        return latest_s

    @property
    def starves_at_s(self) -> float:
        """From then on models in use leave for it; infinite when nothing waits."""
        return self.waiting_since_s + self.spec.max_wait_s / 2 if self.waiting else float("inf")

    def clear_failure(self) -> None:
        self.failures, self.retry_at_s, self.failure, self.failed_for_good = 0, float("-inf"), "", False
        self.avoid_until_s.clear()


_REMEMBERED_S = 5.0
"""Time constant of a device's share of time with waiting requests."""
_OFTEN = 0.25
"""Share of the time with waiting requests above which a device is busy."""


@dataclass(slots=True)
class DeviceState:
    spec: DeviceSpec
    draining: bool = False
    carries: bool = False
    """Draining, and what runs there moves away with its tokens."""
    free_bytes: int | None = None
    busy_kv_bytes: int = 0
    """Mapped KV of running requests, from the last report."""
    waiting_share: float = 0.0
    """Share of the recent time in which requests waited in the device's queue, or in an engine without any memory."""
    stalled: bool = False
    """Requests are here and nothing runs, or what runs has no KV memory at all."""
    memory_short_s: float = 0.0
    """How long requests had been waiting for memory at the last report."""
    reported_s: float = 0.0
    instances: dict[InstanceKey, Instance] = field(default_factory=dict)
    busy_kv: dict[InstanceKey, int] = field(default_factory=dict)
    """``busy_kv_bytes`` by instance."""

    def report(self, report: DeviceReport, now_s: float) -> None:
        self.free_bytes = report.free_bytes
        self.busy_kv = {load.key: load.kv_bytes - load.kv_idle_bytes for load in report.instances}
        self.busy_kv_bytes = sum(self.busy_kv.values())
        waits, runs = any(load.waiting for load in report.instances), any(load.running for load in report.instances)
        self.stalled = self.busy_kv_bytes == 0 if runs else waits
        waits = waits or self.stalled
        self.memory_short_s = report.memory_short_s
        keep = _REMEMBERED_S / (_REMEMBERED_S + now_s - self.reported_s)
        self.waiting_share = self.waiting_share * keep + (1.0 - keep) * waits
        self.reported_s = now_s


class Fleet:
    """All devices with what is placed on them, as objects and as vectors (:class:`PressureBoard`)."""

    def __init__(self) -> None:
        self.devices: dict[DeviceId, DeviceState] = {}
        self.idle: dict[InstanceKey, Instance] = {}
        """Active instances without requests, in the order in which they were found to be idle."""
        self._rebuild()

    def _rebuild(self) -> None:
        self.board = PressureBoard([d.spec for d in self.devices.values()])
        self.index = {id: i for i, id in enumerate(self.devices)}
        self.usable: Mask = np.array([not d.draining for d in self.devices.values()], dtype=np.bool_)
        self.grown_kv: Floats = np.zeros(len(self.devices))
        """KV of running requests beyond what is promised to their instances."""
        for index, device in enumerate(self.devices.values()):
            for instance in device.instances.values():
                self.board.add(index, instance.shard)
            self._count_kv(device)

    def join(self, specs: Iterable[DeviceSpec]) -> None:
        """New devices, or known ones with new properties (they are empty then)."""
        for spec in specs:
            self.devices[spec.id] = DeviceState(spec)
        self._rebuild()

    def leave(self, devices: Iterable[DeviceId]) -> list[Instance]:
        """The devices are gone; returns the instances that had a part there (still placed on surviving devices)."""
        lost: dict[InstanceKey, Instance] = {}
        for id in devices:
            device = self.devices.pop(id, None)
            if device is not None:
                lost.update(device.instances)
        self._rebuild()
        return list(lost.values())

    def set_draining(self, device: DeviceId, on: bool, carry: bool) -> None:
        self.devices[device].draining, self.devices[device].carries = on, on and carry
        self.usable[self.index[device]] = not on

    def put(self, instance: Instance) -> None:
        for id in instance.devices:
            self.devices[id].instances[instance.key] = instance
            self.board.add(self.index[id], instance.shard)

    def take(self, instance: Instance) -> None:
        """Forget the instance on every device that is still there."""
        self.idle.pop(instance.key, None)
        for id in instance.devices:
            device = self.devices.get(id)
            if device is not None and device.instances.pop(instance.key, None) is not None:
                self.board.remove(self.index[id], instance.shard)
                self._count_kv(device)

    def set_rate(self, instance: Instance, weighted_rate: float) -> None:
        """The instance's part of its model's ``r / s`` changed (whole instance, all shards)."""
        old = instance.shard
        new = Shard(weighted_rate / len(instance.devices), old.weight_bytes, old.min_kv_bytes)
        instance.shard = new
        for id in instance.devices:
            index = self.index.get(id)
            if index is not None:
                self.board.rate[index] = max(0.0, self.board.rate[index] + new.weighted_rate - old.weighted_rate)

    def mark_idle(self, instance: Instance, idle_s: float, now_s: float) -> None:
        if instance.idle_since_s is None:
            self.idle[instance.key] = instance
        instance.idle_s, instance.idle_since_s = idle_s, now_s - idle_s

    def mark_busy(self, instance: Instance) -> None:
        instance.idle_since_s = None
        self.idle.pop(instance.key, None)

    def report(self, report: DeviceReport, now_s: float) -> bool:
        """Memory and queue side of a report. False for an unknown device."""
        device = self.devices.get(report.device)
        if device is None:
            return False
        device.report(report, now_s)
        self._count_kv(device)
        return True

    def _count_kv(self, device: DeviceState) -> None:
        index = self.index[device.spec.id]
        self.grown_kv[index] = sum(self._grown_bytes(device, index, instance) for instance in device.instances.values())

    def _grown_bytes(self, device: DeviceState, index: int, instance: Instance) -> int:
        """KV in use by the instance's requests beyond what it was promised."""
        return max(0, device.busy_kv.get(instance.key, 0) - self.board.kv_bytes(index, instance.shard))

    def frees_bytes(self, id: DeviceId, instance: Instance) -> int:
        """What the device has more, in :meth:`room`, once the instance has left it."""
        index, device = self.index[id], self.devices[id]
        held_bytes = self.board.weights_bytes(index, instance.shard) + self.board.kv_bytes(index, instance.shard)
        return held_bytes + self._grown_bytes(device, index, instance)

    def pressed(self, id: DeviceId, kv_share: float) -> bool:
        """The device is short of time (requests have been waiting in its queue) or of memory."""
        return self.devices[id].waiting_share > _OFTEN or self.short_of_memory(id, kv_share)

    def short_of_memory(self, id: DeviceId, kv_share: float) -> bool:
        """Running requests occupy more than ``kv_share`` of what the weights leave."""
        return bool(self.devices[id].busy_kv_bytes > kv_share * self.board.shared[self.index[id]])

    def use_if_moved(
        self, instance: Instance, devices: Iterable[DeviceId], idle_too: bool = False
    ) -> tuple[float, float]:
        """The part of their memory that weights and KV of busy models (``idle_too``: of all) take: on the fullest
        device of ``instance`` now, and on the fullest of ``devices`` with the instance added.

        Engines share a device's bandwidth and every decoding step reads these bytes, so that this is also how slowly
        requests run there, and by that how many run at a time.
        """
        shard_bytes = max(self._held_bytes(id, instance) for id in instance.devices)
        here = max(self._use(id, idle_too) for id in instance.devices)
        there = max(self._use(id, idle_too, shard_bytes) for id in devices)
        return here, there

    def _use(self, id: DeviceId, idle_too: bool, more_bytes: int = 0) -> float:
        device = self.devices[id]
        used_bytes = sum(self._held_bytes(id, i) for i in device.instances.values() if i.busy or idle_too)
        return (used_bytes + more_bytes) / device.spec.memory_bytes

    def _held_bytes(self, id: DeviceId, instance: Instance) -> int:
        """The instance's weights and the KV of its running requests on one device."""
        return instance.shard.weight_bytes + self.devices[id].busy_kv.get(instance.key, 0)

    def requests_wait_for_memory(self, id: DeviceId) -> bool:
        """Requests were waiting for memory, longer than they can bear, when the device reported."""
        return self.devices[id].memory_short_s > 0.0

    def room(self) -> Floats:
        """Bytes of every device that nothing is promised to and no running request occupies."""
        result: Floats = self.board.shared - self.board.promised_kv - self.grown_kv
        return result

    def room_on(self, index: int) -> float:
        """:meth:`room` of one device."""
        board = self.board
        return float(board.shared[index] - board.promised_kv[index] - self.grown_kv[index])

    def fits_now(self, shard: Shard) -> Mask:
        """Usable devices with room for the shard and its least KV."""
        mask: Mask = (self.room() >= self.board.need(shard)) & self.usable
        return mask
