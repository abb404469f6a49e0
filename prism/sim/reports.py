"""What a device tells the controller: memory and the load of every instance, about once a second while it changes, when
a model reaches its keep-alive, when memory is short and when requests wait for too long (the live agents' rules:
:mod:`prism.scheduler.keepalive`, :mod:`prism.scheduler.shortage`, :mod:`prism.scheduler.backlog`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from prism.core.events import DeviceReport, InstanceLoad
from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.keepalive import due_in_s
from prism.scheduler.request_life import DeviceRequests
from prism.sim.account import Account
from prism.sim.job import Job
from prism.sim.kv import KvMemory
from prism.sim.queue import EventQueue

_LOOK_EVERY_S: Final = 0.5
"""How often a queue that is not empty is looked at, at least: one that begins to wait may be due before the others."""


@dataclass(slots=True)
class DeviceShard:
    """The part of an instance that lies on one device."""

    key: InstanceKey
    weight_bytes: int
    leads: bool
    """The device's queue takes the instance's requests."""
    kv: KvMemory | None = None
    """None while it loads, and so is ``lead``."""
    lead: GpuScheduler | None = None
    """The scheduler of the device that leads."""


class Reported(Protocol):
    """What a report reads of its device."""

    id: DeviceId
    account: Account
    scheduler: GpuScheduler
    requests: DeviceRequests[Job]
    shards: dict[InstanceKey, DeviceShard]


class Reports:
    """Of one device; ``send`` gets one at least every ``every_s`` while something changes. An idle device sends
    nothing."""

    def __init__(
        self, device: Reported, queue: EventQueue, every_s: float, send: Callable[[DeviceReport], None]
    ) -> None:
        self._device, self._queue, self._every_s, self._deliver = device, queue, every_s, send
        self._alarm = queue.alarm(self._send)
        self._look = queue.alarm(self._look_at_backlog)
        self._looked_at = 0
        """Requests that waited then."""
        self._next_s = float("-inf")
        """When the last report is old enough for another one."""
        self._keep_alive_s: dict[InstanceKey, float] = {}
        """Of the instances that leave by themselves."""
        self._stopped = False

    def touch(self) -> None:
        """Something has changed: report it when the last report is old enough."""
        at_s = self._alarm.at_s
        if at_s is None or at_s > self._next_s:
            self._by(max(self._next_s, self._queue.now_s))

    def watch_keep_alive(self, key: InstanceKey, keep_alive_s: float | None) -> None:
        """An instance begins to serve: report when its keep-alive may be over for the first time."""
        if keep_alive_s is not None:
            self._keep_alive_s[key] = keep_alive_s
            self._by(self._queue.now_s + keep_alive_s)

    def forget_keep_alive(self, key: InstanceKey) -> None:
        """The instance serves no more."""
        self._keep_alive_s.pop(key, None)

    def watch_shortage(self) -> None:
        """Memory is short: report it if it lasts."""
        due_s = self._device.scheduler.shortage.report_due_s()
        if due_s < float("inf"):
            self._by(max(due_s, self._queue.now_s))

    def watch_backlog(self) -> None:
        """Requests wait: report it if they do so for too long. Looked at again when they have doubled."""
        queued = self._device.scheduler.queued
        if (self._look.at_s is None or queued >= 2 * self._looked_at) and not self._stopped:
            self._looked_at = queued
            due_s = max(self._device.scheduler.backlog_due_s(), self._queue.now_s)
            self._look.set(min(due_s, self._queue.now_s + _LOOK_EVERY_S))

    def _look_at_backlog(self, _: object) -> None:
        if self._device.scheduler.backlog_due_s() <= self._queue.now_s:
            self._send(None)
        if self._device.scheduler.queued:
            self.watch_backlog()

    def _by(self, at_s: float) -> None:
        """Report at ``at_s`` at the latest."""
        if (self._alarm.at_s is None or self._alarm.at_s > at_s) and not self._stopped:
            self._alarm.set(at_s)

    def stop(self) -> None:
        """The device is gone."""
        self._stopped = True
        self._alarm.clear()
        self._look.clear()

    def send_now(self) -> None:
        """The controller is about to hear of an instance, and has the numbers that go with it."""
        self._send(None)

    def _send(self, _: object) -> None:
        now_s = self._queue.now_s
        self._next_s = now_s + self._every_s
        self._deliver(self.report())
        self._device.scheduler.note_report(now_s)
        if len(self._device.requests):
            self.touch()
        if self._keep_alive_s:
            self._by(now_s + due_in_s(self._rests()))

    def report(self) -> DeviceReport:
        account = self._device.account
        free_bytes = (account.free_pages + account.ahead_pages()) * account.page_bytes
        loads = tuple([self._load(shard) for shard in self._device.shards.values()])
        short_s = self._device.scheduler.shortage.age_s(self._queue.now_s)
        return DeviceReport(self._device.id, account.capacity_pages * account.page_bytes, free_bytes, loads, short_s)

    def _rests(self) -> list[tuple[float, float | None]]:
        requests, now_s = self._device.requests, self._queue.now_s
        return [(requests.idle_s(key.model, now_s), keep_s) for key, keep_s in self._keep_alive_s.items()]

    def _load(self, shard: DeviceShard) -> InstanceLoad:
        key, kv, lead, now_s = shard.key, shard.kv, shard.lead, self._queue.now_s
        if kv is None or lead is None:
            return InstanceLoad(key, shard.weight_bytes, 0, 0, 0, 0)
        counts = lead.counts(key)
        if not shard.leads:
            return InstanceLoad(key, shard.weight_bytes, kv.busy_bytes(), kv.idle_bytes(), 0, 0, counts.served)
        times = lead.times(key, now_s)
        return InstanceLoad(
            key,
            shard.weight_bytes,
            kv.busy_bytes(),
            kv.idle_bytes(),
            counts.running,
            counts.waiting,
            counts.served,
            self._device.requests.idle_s(key.model, now_s),
            times.waited_s,
            times.token_s,
        )
