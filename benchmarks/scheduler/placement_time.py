"""How long does Algorithm 1 take for 1,000 models on 1,000 devices, and how much does vectorising over devices gain?

Both sides in one run: :func:`prism.policy.placement.place_models` and the listing as plain loops. Target: 50 ms on one
core.

Times are CPU times, so that other work on the machine does not count.

    python -m benchmarks.scheduler.placement_time

Last result (2 cores shared with other work, 24 GB, no GPU): 32.6 ms (paper), 23.6 ms (lookahead), plain loops 80.9 ms.
"""

from __future__ import annotations

import random
import statistics
import time

from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.settings import KvprMode
from prism.core.specs import DeviceKind, DeviceSpec
from prism.policy.placement import PlacementModel, mean_pressure, place_models

REPEATS = 9


def problem(count: int, seed: int) -> tuple[list[PlacementModel], list[DeviceSpec]]:
    """``count`` models of 2-40 GiB with long-tailed rates, on as many 80 GiB devices in nodes of eight."""
    rng = random.Random(seed)
    devices = [
        DeviceSpec(DeviceId(f"n{i // 8}/cuda:{i % 8}"), NodeId(f"n{i // 8}"), DeviceKind.CUDA, 80 << 30)
        for i in range(count)
    ]
    models = [
        PlacementModel(
            ModelName(f"m{i}"),
            rng.paretovariate(1.2) / rng.uniform(0.1, 5.0),
            rng.randrange(2 << 30, 40 << 30),
            1 << 30,
            tp=rng.choice([1] * 15 + [2]),
            current=(rng.choice(devices).id,),
        )
        for i in range(count)
    ]
    return models, devices


def listing(models: list[PlacementModel], devices: list[DeviceSpec]) -> None:
    """Algorithm 1 as printed, feasibility added: a loop over devices for every shard."""
    rate, shared = [0.0] * len(devices), [float(d.memory_bytes) for d in devices]
    for model in sorted(models, key=lambda m: -m.weighted_rate):
        shard = model.shard
        for _ in range(model.tp):
            best, best_kvpr = -1, float("inf")
            for i in range(len(devices)):
                if shared[i] < shard.weight_bytes + shard.min_kv_bytes:
                    continue
                kvpr = rate[i] / shared[i]
                if kvpr < best_kvpr:
                    best, best_kvpr = i, kvpr
            rate[best] += shard.weighted_rate
            shared[best] -= shard.weight_bytes


def median_ms(run: object) -> tuple[float, float]:
    times = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        run()  # type: ignore[operator]
        times.append((time.process_time() - start_s) * 1e3)
    return statistics.median(times), max(times) - min(times)


def main() -> None:
    models, devices = problem(1000, 1)
    tau = 0.1 * mean_pressure(models, devices)
    loop_ms, loop_spread_ms = median_ms(lambda: listing(models, devices))
    print(f"listing, plain loops   {loop_ms:8.1f} ms  (spread {loop_spread_ms:.1f})")
    for mode in KvprMode:
        ms, spread_ms = median_ms(lambda mode=mode: place_models(models, devices, tau, mode))
        print(f"place(), {mode.value:<13} {ms:8.1f} ms  (spread {spread_ms:.1f})  {loop_ms / ms:.1f}x  target 50 ms")


if __name__ == "__main__":
    main()
