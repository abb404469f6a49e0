"""What every world around the cluster scheduler needs: devices, and events and effects that go to and fro."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from prism.core.effects import ClusterEffect
from prism.core.events import ClusterEvent
from prism.core.ids import DeviceId, NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from prism.scheduler.cluster import ClusterScheduler


def node_devices(node: str, count: int, memory: int = 1000, max_engines: int = 0) -> tuple[DeviceSpec, ...]:
    """``count`` devices of ``memory`` bytes each."""
    return tuple(
        DeviceSpec(DeviceId(f"{node}/host:{i}"), NodeId(node), DeviceKind.HOST, memory, max_engines=max_engines)
        for i in range(count)
    )


def exchange(
    scheduler: ClusterScheduler,
    events: Iterable[ClusterEvent],
    now_s: float,
    carry_out: Callable[[ClusterEffect], list[ClusterEvent]],
) -> int:
    """Sends ``events``, then whatever ``carry_out`` answers to the effects, in order, until nothing is left to say; all
    at one moment. The number of events sent."""
    pending, count = deque(events), 0
    while pending:
        count += 1
        for effect in scheduler.on_event(pending.popleft(), now_s):
            pending += carry_out(effect)
    return count
