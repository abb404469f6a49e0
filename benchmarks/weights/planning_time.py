"""Question: how long does planning a multicast take for 1,000 nodes and 64 blocks (goal: 100 ms)?

Command: python -m benchmarks.weights.planning_time

The whole of it: every candidate built and timed by the model, and the parts of all nodes made for sending.

Last result (2 cores, 24 GB, no GPU): see docs/results/weights.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from prism.policy.multicast.estimate import NodeLink
from prism.policy.multicast.planner import PlanRequest, plan
from prism.transfer.session import node_plans

REPS = 5


def best_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPS):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return min(times) * 1e3


def main() -> None:
    for count in (8, 100, 1000):
        names = tuple(f"r{i}" for i in range(count - 1))
        mixed = {name: NodeLink(1e9 * (1 + i % 3), 1e9) for i, name in enumerate(names)}
        for label, links, sources in (("equal links", {}, 1), ("three link speeds", mixed, 1), ("four sources", {}, 4)):
            senders = tuple(f"s{i}" for i in range(sources))
            request = PlanRequest(senders, names, 16 << 30, links=links, blocks=64)
            chosen = plan(request)
            ms = best_ms(partial(plan, request))
            print(f"{ms:8.1f} ms  {count} nodes, 64 blocks, {label}: {chosen.schedule.algorithm}")
        free = PlanRequest(("s0",), names, 16 << 30, links=mixed)
        ms = best_ms(partial(plan, free))
        print(f"{ms:8.1f} ms  {count} nodes, three link speeds, blocks chosen: {plan(free).schedule.blocks}")
        addresses = dict.fromkeys(chosen.nodes, "10.0.0.1:1")
        ms = best_ms(partial(node_plans, chosen, "session", "weights/m/raw", addresses))
        print(f"{ms:8.1f} ms  {count} nodes: parts for every node")


if __name__ == "__main__":
    main()
