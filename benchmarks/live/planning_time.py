"""How long does a whole plan of a scale-out take: who sends what to whom, and which pipelines serve meanwhile?

A fleet of 1,000 devices in machines of eight, four of whose machines hold the model; 64 of them receive it. Links are
all alike, or half of them four times slower, or machines are pairs with a fast link between them, sixteen under each
switch with an uplink of four. Target: 100 ms on one core, λPipe's plan and the chains each.

Times are CPU times, so that other work on the machine does not count.

    python -m benchmarks.live.planning_time

Results: docs/results/live-scaling.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prism.policy.live.pipelines import LiveRequest, plan_live
from prism.policy.multicast.chains import LinkedDevice, plan_chains
from prism.policy.multicast.estimate import NodeLink
from prism.policy.multicast.planner import PlanRequest
from prism.policy.multicast.topology import NetworkTopology

REPEATS = 9
DEVICES, PER_MACHINE, SOURCES, RECEIVERS = 1000, 8, 4, 64
MODEL_BYTES = 16 << 30
FAST, SLOW = 12.5e9, 3.125e9


def rate_of(index: int, mixed: bool) -> float:
    return SLOW if mixed and index % 2 else FAST


def wired(names: list[str]) -> NetworkTopology:
    """Pairs, and switches of sixteen."""
    leaves = {name: f"leaf{i // 16}" for i, name in enumerate(names)}
    uplinks = dict.fromkeys(leaves.values(), 4 * FAST)
    return NetworkTopology({name: f"pair{i // 2}" for i, name in enumerate(names)}, leaves, uplink_bytes_s=uplinks)


def multicast(mixed: bool, switches: bool = False) -> LiveRequest:
    """Every machine receives; links of all machines of the fleet are known."""
    names = [f"n{i}" for i in range(DEVICES)]
    links = {name: NodeLink(rate_of(i, mixed), rate_of(i, mixed)) for i, name in enumerate(names)}
    request = PlanRequest(tuple(names[:SOURCES]), tuple(names[SOURCES : SOURCES + RECEIVERS]), MODEL_BYTES, links=links)
    request = replace(request, topology=wired(names)) if switches else request
    return LiveRequest(request, free_devices=dict.fromkeys(request.receivers, 2))


def fleet(mixed: bool) -> tuple[list[LinkedDevice], list[LinkedDevice]]:
    """All devices of the fleet are asked: those of the first machines hold the model, every second one sends."""
    devices = [
        LinkedDevice(f"d{i}", f"m{i // PER_MACHINE}", f"leaf{i // 64}", rate_of(i, mixed), i % 2 == 1)
        for i in range(DEVICES)
    ]
    return devices[: SOURCES * PER_MACHINE], devices[SOURCES * PER_MACHINE :]


def median_ms(run: Callable[[], object]) -> float:
    took = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        run()
        took.append(1e3 * (time.process_time() - start_s))
    return statistics.median(took)


def main() -> None:
    cases = {"equal links": (False, False), "half of the links four times slower": (True, False)}
    for links, (mixed, switches) in (cases | {"pairs and switches": (False, True)}).items():
        request, (sources, targets) = multicast(mixed, switches), fleet(mixed)
        plan = plan_live(request)
        shape = f"{plan.multicast.schedule.algorithm}, {plan.multicast.schedule.blocks} blocks, {len(plan.pipelines)}"
        expected = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in plan.multicast.considered.items())
        print(f"{links}: pipelines {median_ms(partial(plan_live, request)):.1f} ms ({shape} pipelines; {expected})")
        print(f"{links}: chains {median_ms(partial(plan_chains, sources, targets)):.1f} ms")


if __name__ == "__main__":
    main()
