"""All devices with what is placed on them. Bookkeeping only: no decision is taken here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from prism.core.events import DeviceReport
from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.core.specs import DeviceSpec
from prism.policy.pressure import Floats, Mask, PressureBoard, Shard
from prism.scheduler.records import DeviceRecord, InstanceRecord

_LOAD_REMEMBERED_S: Final = 10.0
"""Time constant of a device's bandwidth load."""


class Fleet:
    """Devices as records, and as vectors over all of them (:class:`PressureBoard`)."""

    def __init__(self) -> None:
        self.devices: dict[DeviceId, DeviceRecord] = {}
        self.idle: dict[InstanceKey, InstanceRecord] = {}
        """Active instances without requests, in the order in which they were found to be idle."""
        self._kept_free_s: dict[DeviceId, float] = {}
        """When a model in use last had to leave for its neighbours' KV, the latest last: of the few devices where that
        has happened, so that a look for a place does not ask them all."""
        self.version = 0
        """Another one whenever devices come, go, change or drain."""
        self._rebuild()

    def _rebuild(self) -> None:
        self.version += 1
        self.board = PressureBoard([d.spec for d in self.devices.values()])
        self.index = {id: i for i, id in enumerate(self.devices)}
        self.usable: Mask = np.array([not d.draining for d in self.devices.values()], dtype=np.bool_)
        self.grown_kv: Floats = np.zeros(len(self.devices))
        """KV of running requests beyond what is promised to their instances."""
        self.work: Floats = np.zeros(len(self.devices))
        """Bandwidth that instances are expected to take of each device over time (:mod:`prism.policy.work`)."""
        self.kv_work: Floats = np.zeros(len(self.devices))
        """KV bytes that their requests are expected to hold."""
        self._load_mean, self._load_now, self._load_s = self._kept_loads()
        for index, (id, device) in enumerate(self.devices.items()):
            for instance in device.instances.values():
                self.board.charge(index, instance.shards[id])
                self._count_work(index, instance, 1.0)
            self._count_kv(device)

    def _kept_loads(self) -> tuple[Floats, Floats, Floats]:
        """Bandwidth load of every device: its mean up to its last report, as reported then, and when that was."""
        records = self.devices.values()
        mean = np.array([d.load_mean for d in records], dtype=np.float64)
        now = np.array([d.load_now for d in records], dtype=np.float64)
        return mean, now, np.array([d.reported_s for d in records], dtype=np.float64)

    def add_devices(self, specs: Iterable[DeviceSpec]) -> None:
        """New devices, or known ones with new properties (they are empty then)."""
        for spec in specs:
            self.devices[spec.id] = DeviceRecord(spec)
            self._kept_free_s.pop(spec.id, None)
        self._rebuild()

    def remove_devices(self, devices: Iterable[DeviceId]) -> list[InstanceRecord]:
        """The devices are gone; returns the instances that had a part there (still placed on surviving devices)."""
        lost: dict[InstanceKey, InstanceRecord] = {}
        for id in devices:
            device = self.devices.pop(id, None)
            self._kept_free_s.pop(id, None)
            if device is not None:
                lost.update(device.instances)
        self._rebuild()
        return list(lost.values())

    def set_draining(self, device: DeviceId, on: bool, carry: bool) -> None:
        self.devices[device].draining, self.devices[device].carries = on, on and carry
        self.version += 1
        self.usable[self.index[device]] = not on

    def charge_instance(self, instance: InstanceRecord) -> None:
        """Charge every device of the instance with its shard."""
        for id, shard in instance.shards.items():
            self.devices[id].instances[instance.key] = instance
            self.board.charge(self.index[id], shard)
            self._count_work(self.index[id], instance, 1.0)

    def release_instance(self, instance: InstanceRecord) -> None:
        """Forget the instance on every device that is still there."""
        self.idle.pop(instance.key, None)
        for id, shard in instance.shards.items():
            device = self.devices.get(id)
            if device is not None and device.instances.pop(instance.key, None) is not None:
                self.board.release(self.index[id], shard)
                self._count_work(self.index[id], instance, -1.0)
                self._count_kv(device)

    def set_rate(self, instance: InstanceRecord, weighted_rate: float) -> None:
        """The instance's part of its model's ``r / s`` changed. Every part meets all of the instance's requests, and
        the devices of a part share its work."""
        for part in instance.parts:
            rate = weighted_rate / len(part.devices)
            for id in part.devices:
                old = instance.shards[id]
                instance.shards[id] = Shard(rate, old.weight_bytes, old.min_kv_bytes)
                index = self.index.get(id)
                if index is not None:
                    known = self.board.rate
                    known[index] = max(0.0, known.item(index) + rate - old.weighted_rate)

    def keep_free(self, device: DeviceId, now_s: float) -> None:
        """A model in use leaves it for its neighbours' KV."""
        self._kept_free_s.pop(device, None)
        self._kept_free_s[device] = now_s

    def kept_free(self, for_s: float, now_s: float) -> Iterator[DeviceId]:
        """Devices with :meth:`keep_free` in the last ``for_s`` seconds."""
        for id, at_s in reversed(self._kept_free_s.items()):
            if now_s - at_s >= for_s:
                return
            yield id

    def mark_idle(self, instance: InstanceRecord, idle_s: float, now_s: float) -> None:
        if instance.idle_since_s is None:
            self.idle[instance.key] = instance
        instance.idle_s, instance.idle_since_s = idle_s, now_s - idle_s

    def mark_busy(self, instance: InstanceRecord) -> None:
        if instance.idle_since_s is not None:
            instance.idle_since_s = None
            self.idle.pop(instance.key, None)

    def take_report(self, report: DeviceReport, now_s: float) -> bool:
        """Memory and queue side of a report. False for an unknown device."""
        device = self.devices.get(report.device)
        if device is None:
            return False
        device.take_report(report, now_s)
        self._resize(device, report.capacity_bytes)
        self._count_kv(device)
        return True

    def _resize(self, device: DeviceRecord, capacity_bytes: int) -> None:
        """Other programs took memory of the device, or gave some back. Less than a page changes nothing."""
        more_bytes = capacity_bytes - device.spec.memory_bytes
        if abs(more_bytes) >= max(1, device.spec.page_bytes):
            device.spec = replace(device.spec, memory_bytes=capacity_bytes)
            self.board.resize(self.index[device.spec.id], more_bytes)
            self.version += 1

    def set_load(self, id: DeviceId, load: float, now_s: float) -> None:
        """Engines with requests take ``load`` of the device's bandwidth from now on."""
        device, index = self.devices[id], self.index[id]
        device.load_mean, device.load_now = self.load_of(id, now_s), load
        self._load_mean[index], self._load_now[index], self._load_s[index] = device.load_mean, load, now_s

    def load_of(self, id: DeviceId, now_s: float) -> float:
        """Sum of the bandwidth shares of engines with requests on the device, mean of the last ten seconds or so."""
        index = self.index[id]
        keep = math.exp((self._load_s.item(index) - now_s) / _LOAD_REMEMBERED_S)
        return self._load_mean.item(index) * keep + self._load_now.item(index) * (1.0 - keep)

    def loads(self, now_s: float) -> Floats:
        """:meth:`load_of` for every device."""
        keep: Floats = np.exp((self._load_s - now_s) / _LOAD_REMEMBERED_S)
        result: Floats = self._load_mean * keep + self._load_now * (1.0 - keep)
        return result

    def set_work(self, instance: InstanceRecord, work: float, kv_bytes: float) -> None:
        """What the instance is expected to take of each of its devices over time changed."""
        for id in instance.shards:
            if (index := self.index.get(id)) is not None:
                self.work[index] = max(0.0, max(0.0, self.work.item(index) - instance.work) + work)
                held_bytes = max(0.0, self.kv_work.item(index) - instance.kv_work_bytes)
                self.kv_work[index] = max(0.0, held_bytes + kv_bytes)
        instance.work, instance.kv_work_bytes = work, kv_bytes

    def _count_work(self, index: int, instance: InstanceRecord, sign: float) -> None:
        self.work[index] = max(0.0, self.work.item(index) + sign * instance.work)
        self.kv_work[index] = max(0.0, self.kv_work.item(index) + sign * instance.kv_work_bytes)

    def work_on(self, id: DeviceId) -> float:
        """``work`` of one device."""
        return float(self.work[self.index[id]])

    def headroom_bytes(self, id: DeviceId) -> float:
        """:meth:`room_on` of the device when the requests there need as much KV as at their latest peak."""
        device = self.devices[id]
        return self.room_on(self.index[id]) - max(0.0, device.kv_peak_bytes - device.busy_kv_bytes)

    def _count_kv(self, device: DeviceRecord) -> None:
        grown_bytes = 0
        if device.busy_kv_bytes:
            for instance in device.instances.values():
                if device.busy_kv.get(instance.key, 0) > 0:
                    grown_bytes += self._grown_bytes(device, instance)
        self.grown_kv[self.index[device.spec.id]] = grown_bytes

    def _grown_bytes(self, device: DeviceRecord, instance: InstanceRecord) -> int:
        """KV in use by the instance's requests beyond what it was promised."""
        busy_bytes = device.busy_kv.get(instance.key, 0)
        if busy_bytes <= 0:
            return 0
        id = device.spec.id
        return max(0, busy_bytes - self.board.kv_bytes(self.index[id], instance.shards[id]))

    def frees_bytes(self, id: DeviceId, instance: InstanceRecord) -> int:
        """What the device has more, in :meth:`room`, once the instance has left it."""
        index, shard = self.index[id], instance.shards[id]
        held_bytes = self.board.weights_bytes(index, shard) + self.board.kv_bytes(index, shard)
        return held_bytes + self._grown_bytes(self.devices[id], instance)

    def room(self) -> Floats:
        """Bytes of every device that nothing is promised to and no running request occupies."""
        result: Floats = self.board.shared - self.board.promised_kv - self.grown_kv
        return result

    def room_on(self, index: int) -> float:
        """:meth:`room` of one device."""
        board = self.board
        return float(board.shared.item(index) - board.promised_kv.item(index) - self.grown_kv.item(index))

    def fits_now(self, shard: Shard) -> Mask:
        """Usable devices with room for the shard and its least KV, and for one more engine."""
        return self.board.with_seat((self.room() >= self.board.need(shard)) & self.usable)
