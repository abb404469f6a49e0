"""How near to the best plan does the placer come, and how fast (AQUA, section 5: 128 GPUs within 2% in 5 s)?

    python -m benchmarks.sim.placer [--draws 10] [--first 0]

Fleets of 16 to 128 GPUs are filled as in the paper's evaluation: a quarter of the models are of the kinds that keep
memory free (images, audio), the others language models of which some lend and most lack memory when bursts come. The
gap is to a bound below every plan, so that it is at most what it says. The one-pass answer, as it is made online, is
timed beside it for 1,000 devices.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from prism.core.ids import ModelName
from prism.policy.lending_map import (
    MemoryNeed,
    Servers,
    assign_in_turn,
    imbalance_bytes,
    match_lenders,
)
from prism.sim.lending_program import plan_lending

GB = 10**9
# (share of the draws, shards, GB to spare or lacked per shard), in the range of the paper's Table 1 and Figure 7.
KINDS = (
    (0.10, 1, (20, 45)),
    (0.15, 1, (25, 55)),
    (0.20, 1, (12, 40)),
    (0.30, 1, (-45, -8)),
    (0.15, 2, (-40, -10)),
    (0.10, 4, (10, 18)),
)


def draw_fleet(gpus: int, seed: int) -> list[MemoryNeed]:
    """Models until the devices are used up."""
    draw, found, left = random.Random(seed), list[MemoryNeed](), gpus
    while left:
        _, shards, (low, high) = draw.choices(KINDS, weights=[k[0] for k in KINDS])[0]
        if shards <= left:
            found.append(MemoryNeed(ModelName(f"m{len(found)}"), shards, draw.randint(low, high) * GB))
            left -= shards
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    options = parser.parse_args()
    print("  GPUs  plans by search / program   gap: median    worst   seconds: median   worst   one pass: gap   ms")
    for gpus in (16, 32, 64, 128):
        _row(gpus, range(1000 * gpus + options.first, 1000 * gpus + options.first + options.draws))
    _online(1000)


def _row(gpus: int, seeds: range) -> None:
    servers = Servers(gpus // 8, 8, 80 * GB)
    gaps, took, passes, pass_ms, solvers = [], [], [], [], []
    for seed in seeds:
        needs = draw_fleet(gpus, seed)
        start_s = time.perf_counter()
        first = assign_in_turn(needs, servers)
        pass_ms.append(1000 * (time.perf_counter() - start_s))
        start_s = time.perf_counter()
        plan = plan_lending(needs, servers)
        took.append(time.perf_counter() - start_s)
        gaps.append(plan.gap)
        solvers.append(plan.solver)
        if first is not None:
            scale = max(abs(plan.bound_bytes), servers.gpu_bytes)
            passes.append((imbalance_bytes(needs, first, servers) - plan.bound_bytes) / scale)
    print(
        f"{gpus:6} {solvers.count('local search'):12} / {solvers.count('program'):<12}"
        f"{statistics.median(gaps):12.2%} {max(gaps):8.2%} {statistics.median(took):15.2f} {max(took):9.2f}"
        f"{statistics.median(passes):14.2%} {statistics.median(pass_ms):6.2f}"
    )


def _online(gpus: int) -> None:
    needs, servers = draw_fleet(gpus, 7), Servers(gpus // 8, 8, 80 * GB)
    best = []
    for _ in range(5):
        start_s = time.perf_counter()
        at = assign_in_turn(needs, servers)
        assert at is not None
        beside: list[list[MemoryNeed]] = [[] for _ in range(servers.count)]
        for need, server in zip(needs, at, strict=True):
            beside[server].append(need)
        for found in beside:
            match_lenders(found)
        best.append(1000 * (time.perf_counter() - start_s))
    print(f"{gpus} devices in one pass, matching included: {min(best):.1f} ms")


if __name__ == "__main__":
    main()
