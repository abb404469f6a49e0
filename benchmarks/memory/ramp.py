"""Is mapping off the critical path?

    python -m benchmarks.memory.ramp

An engine grows steadily: 16 slots (a page of 2 MiB) every 10 ms, as decoding does at 1600 tokens/s. Latency of each
alloc: everything mapped before (no mapping), pages mapped ahead by the helper thread, and mapping on demand. The three
take turns; a percentile is the median over the rounds.
Goal: p99 with pages mapped ahead within 2x of no mapping.

Last result: docs/results/memory.md.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.memory.bench import GIB, LLAMA_8B, MIB, temporary_device
from prism import memory

STEPS = 300
ROUNDS = 5
PERCENTILES = (50, 99, 100)
PERIOD_S = 0.01
PAGE = 2 * MIB


def ramp(pool: memory.Pool) -> np.ndarray:
    """Latencies in microseconds."""
    times, next_s = [], time.perf_counter()
    for _ in range(STEPS):
        next_s += PERIOD_S
        time.sleep(max(0.0, next_s - time.perf_counter()))
        start = time.perf_counter()
        pool.alloc(16)
        times.append((time.perf_counter() - start) * 1e6)
    return np.array(times)


def run(prepare: str) -> np.ndarray:
    with temporary_device(2 * GIB) as device, device.register("bench") as owner:
        pool = owner.arena(16 * GIB).divide(LLAMA_8B, 20_000, (STEPS + 20) * PAGE)
        if prepare == "mapped":
            pool.free(pool.alloc(STEPS * 16))
        if prepare == "ahead":
            pool.set_ahead(16 * PAGE, 32 * PAGE)
            time.sleep(0.2)
        return ramp(pool)


def main() -> None:
    rounds: dict[str, list[np.ndarray]] = {"mapped": [], "ahead": [], "demand": []}
    for _ in range(ROUNDS):
        for name, found in rounds.items():
            found.append(np.percentile(run(name), PERCENTILES))
    results = {name: np.median(found, axis=0) for name, found in rounds.items()}
    base = results["mapped"][1]
    for name, (p50, p99, worst) in results.items():
        goal = "; goal <= 2" if name == "ahead" else ""
        print(
            f"{name:<8} p50 {p50:8.2f} us   p99 {p99:8.2f} us ({p99 / base:.2f} x mapped{goal})   max {worst:8.1f} us"
        )


if __name__ == "__main__":
    main()
