"""What a device tells the controller: memory and the load of every instance, about once a second while it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.core.events import DeviceReport, ModelLoad
from prism.core.ids import Generation, ModelName
from prism.sim.engine import Engine

if TYPE_CHECKING:
    from prism.sim.device import Device

InstanceKey = tuple[ModelName, Generation]


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
        self._sent_s = float("-inf")

    def touch(self) -> None:
        """Something has changed: report it when the last report is old enough."""
        if self._alarm.at_s is None and not self._device.gone:
            earliest_s = self._sent_s + self._world.cluster.timing.report_every
            self._alarm.set(max(earliest_s, self._world.queue.now_s))

    def stop(self) -> None:
        self._alarm.clear()

    def _send(self, _: object) -> None:
        self._sent_s = self._world.queue.now_s
        self._world.control.tell(self.report())
        if self._device.jobs:
            self.touch()

    def report(self) -> DeviceReport:
        account = self._device.account
        free_bytes = (account.free_pages + account.ahead_pages()) * account.page_bytes
        loads = tuple(self._model_load(shard) for shard in self._device.shards.values())
        return DeviceReport(self._device.id, account.capacity_pages * account.page_bytes, free_bytes, loads)

    def _model_load(self, shard: Shard) -> ModelLoad:
        model, generation = shard.key
        engine = shard.engine
        if engine is None:
            return ModelLoad(model, generation, shard.weight_bytes, 0, 0, 0, 0)
        rank0 = shard.rank == 0
        return ModelLoad(
            model,
            generation,
            shard.weight_bytes,
            engine.kv.busy_bytes(),
            engine.kv.idle_bytes(),
            engine.jobs if rank0 else 0,
            self._device.waiting.get(model, 0) if rank0 else 0,
        )
