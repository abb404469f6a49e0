"""What a device tells the controller: memory and the load of every instance, about once a second while it changes, when
a model reaches its keep-alive and when memory has become short (the live agents' rules:
:mod:`prism.scheduler.keepalive`, :mod:`prism.scheduler.shortage`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.core.events import DeviceReport, InstanceLoad
from prism.core.instances import InstanceKey
from prism.scheduler.keepalive import due_in_s
from prism.sim.engine import Engine

if TYPE_CHECKING:
    from prism.sim.device import Device


@dataclass(slots=True)
class Shard:
    """The part of an instance that lies on one device."""

    key: InstanceKey
    weight_bytes: int
    engine: Engine | None = None
    rank: int = 0


class Reports:
    """Of one device. An idle device sends nothing."""

    def __init__(self, device: Device) -> None:
        self._device, self._world = device, device.world
        self._alarm = device.world.queue.alarm(self._send)
        self._next_s = float("-inf")
        """When the last report is old enough for another one."""
        self._keeps = False
        """A model that leaves by itself was here."""

    def touch(self) -> None:
        """Something has changed: report it when the last report is old enough."""
        at_s = self._alarm.at_s
        if at_s is None or at_s > self._next_s:
            self._by(max(self._next_s, self._world.queue.now_s))

    def watch(self, keep_alive_s: float | None) -> None:
        """An instance begins to serve: report when its keep-alive may be over for the first time."""
        if keep_alive_s is not None:
            self._keeps = True
            self._by(self._world.queue.now_s + keep_alive_s)

    def watch_shortage(self) -> None:
        """Memory is short: report it if it lasts."""
        due_s = self._device.scheduler.shortage.report_due_s()
        if due_s < float("inf"):
            self._by(max(due_s, self._world.queue.now_s))

    def _by(self, at_s: float) -> None:
        """Report at ``at_s`` at the latest."""
        if (self._alarm.at_s is None or self._alarm.at_s > at_s) and not self._device.gone:
            self._alarm.set(at_s)

    def stop(self) -> None:
        self._alarm.clear()

    def _send(self, _: object) -> None:
        now_s = self._world.queue.now_s
        self._next_s = now_s + self._world.cluster.timing.report_every
        self._world.control.tell(self.report())
        self._device.scheduler.shortage.told(now_s)
        if self._device.jobs:
            self.touch()
        if self._keeps:
            self._by(now_s + due_in_s(self._rests()))

    def report(self) -> DeviceReport:
        account = self._device.account
        free_bytes = (account.free_pages + account.ahead_pages()) * account.page_bytes
        loads = tuple(self._model_load(shard) for shard in self._device.shards.values())
        short_s = self._device.scheduler.shortage.age_s(self._world.queue.now_s)
        return DeviceReport(self._device.id, account.capacity_pages * account.page_bytes, free_bytes, loads, short_s)

    def _rests(self) -> list[tuple[float, float | None]]:
        device, specs = self._device, self._world.specs
        return [(device.idle_s(engine), specs[model].keep_alive_s) for model, engine in device.engines.items()]

    def _model_load(self, shard: Shard) -> InstanceLoad:
        model, engine = shard.key.model, shard.engine
        if engine is None:
            return InstanceLoad(shard.key, shard.weight_bytes, 0, 0, 0, 0)
        rank0, device = shard.rank == 0, self._device
        running, waiting = (engine.jobs, device.waiting.get(model, 0)) if rank0 else (0, 0)
        return InstanceLoad(
            shard.key,
            shard.weight_bytes,
            engine.kv.busy_bytes(),
            engine.kv.idle_bytes(),
            running,
            waiting,
            idle_s=0.0 if running or waiting or not rank0 else device.rested_s(model),
        )
