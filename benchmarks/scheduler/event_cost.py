"""Does the cost of an event of the cluster scheduler depend on the number of models that nobody asks for?

One run each with 100, 1,000, 10,000 and 100,000 models in the catalog, of which 100 get requests, on 100 devices.

    python -m benchmarks.scheduler.event_cost

Last result (2 cores shared with other work, 24 GB, no GPU): 13.2, 13.1, 13.2 and 13.0 us per event.
"""

from __future__ import annotations

import random
import time

from prism.core.effects import Activate, ClusterEffect, Deactivate
from prism.core.events import (
    ActivationFinished,
    Arrivals,
    ClusterEvent,
    DeactivationFinished,
    DeviceReport,
    InstanceLoad,
    NodeJoined,
    WaitingRequests,
)
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.instances import InstanceKey
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelShape, ModelSpec
from prism.scheduler import cluster_scheduler
from tests.scheduler.exchange import exchange, node_devices

SHAPE = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
EVENTS = 20_000


def run(catalog_size: int) -> float:
    """CPU microseconds per event."""
    specs = [ModelSpec(ModelName(f"m{i}"), "p", 1.0, 0.1, 16 << 30, SHAPE, 8192) for i in range(catalog_size)]
    scheduler = cluster_scheduler(ClusterSettings(), specs)
    rng = random.Random(1)
    now_s, count = 0.0, 0
    active: dict[InstanceKey, DeviceId] = {}

    def send(event: ClusterEvent) -> None:
        nonlocal count
        count += exchange(scheduler, [event], now_s, answers)

    def answers(effect: ClusterEffect) -> list[ClusterEvent]:
        if isinstance(effect, Activate):
            active[effect.key] = effect.devices[0]
            return [ActivationFinished(effect.key, 0.5)]
        if isinstance(effect, Deactivate):
            del active[effect.key]
            return [DeactivationFinished(effect.key)]
        return []

    send(NodeJoined(NodeId("n"), node_devices("n", 100, 40 << 30)))
    start_s = time.process_time()
    while count < EVENTS:
        now_s += rng.expovariate(50.0)
        model = ModelName(f"m{rng.randrange(100)}")
        send(Arrivals(model, 1))
        here = next((key for key in active if key[0] == model), None)
        if here is None:
            send(WaitingRequests(model, 1, now_s))
            send(WaitingRequests(model, 0, now_s))
        else:
            load = InstanceLoad(here, 16 << 30, 1 << 30, 1 << 30, 0, 0, 1)
            send(DeviceReport(active[here], 40 << 30, 8 << 30, (load,)))
    return (time.process_time() - start_s) / count * 1e6


def main() -> None:
    first_us = run(100)
    for size in (100, 1_000, 10_000, 100_000):
        us = run(size)
        print(f"{size:7} models in the catalog: {us:6.1f} us per event ({us / first_us:.2f}x)")


if __name__ == "__main__":
    main()
