"""How crowded devices are: short of memory or time, and how full with one model more. Questions to the fleet."""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.ids import DeviceId
from prism.scheduler.fleet import Fleet
from prism.scheduler.records import InstanceRecord

_OFTEN = 0.25
"""Share of the time with waiting requests above which a device is busy."""


def is_pressed(fleet: Fleet, id: DeviceId, kv_share: float) -> bool:
    """The device is short of time (requests have been waiting in its queue), or of memory: running requests occupy more
    than ``kv_share`` of what the weights leave."""
    device = fleet.devices[id]
    return device.waiting_share > _OFTEN or bool(device.busy_kv_bytes > kv_share * fleet.board.shared[fleet.index[id]])


def requests_wait_for_memory(fleet: Fleet, id: DeviceId) -> bool:
    """Requests were waiting for memory, longer than they can bear, when the device reported."""
    return fleet.devices[id].memory_short_s > 0.0


def use_if_moved(
    fleet: Fleet, instance: InstanceRecord, devices: Iterable[DeviceId], idle_too: bool = False
) -> tuple[float, float]:
    """The part of their memory that weights and KV of busy models (``idle_too``: of all) take: on the fullest device of
    ``instance`` now, and on the fullest of ``devices`` with the instance added.

    Engines share a device's bandwidth and every decoding step reads these bytes, so that this is also how slowly
    requests run there, and by that how many run at a time.
    """
    shard_bytes = max(_held_bytes(fleet, id, instance) for id in instance.shards)
    here = max(_use(fleet, id, idle_too) for id in instance.shards)
    there = max(_use(fleet, id, idle_too, shard_bytes) for id in devices)
    return here, there


def _use(fleet: Fleet, id: DeviceId, idle_too: bool, more_bytes: int = 0) -> float:
    device = fleet.devices[id]
    used_bytes = sum(_held_bytes(fleet, id, i) for i in device.instances.values() if i.busy or idle_too)
    return (used_bytes + more_bytes) / device.spec.memory_bytes


def _held_bytes(fleet: Fleet, id: DeviceId, instance: InstanceRecord) -> int:
    """The instance's weights and the KV of its running requests on one device."""
    return instance.shards[id].weight_bytes + fleet.devices[id].busy_kv.get(instance.key, 0)
