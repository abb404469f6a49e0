"""How near does ZigZag's queue come to the integer program it stands for, and what do best effort and stopping cost?

Batches that all wait when loading begins, a layer of each taking 1; a further layer loads in 1, 3 or 6. The program is
BlitzScale's (5.2), solved by HiGHS.

    python -m benchmarks.live.zigzag

Results: docs/results/live-scaling.md.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from prism.policy.live.paired import PairedBatch, PairRule, finish_pair


def program_mean_s(count: int, layers: int, load_s: float) -> float:
    """The mean finish time of ``count`` batches by the integer program: T_i layers of batch i run on the new instance,
    L - T_i on the old one, which runs batch after batch::

        minimise   sum_i sum_{j <= i} (L - T_j)
        C2         load + sum_{j <= i} T_j <= start_i           if T_i > 0: the new one is done when the old one begins
        C3         load * T_i + 1          <= start_i           if T_i > 0: its last layer was there in time

    with start_i = sum_{j < i} (L - T_j)."""
    n = count
    cost = np.concatenate([-np.arange(n, 0, -1.0), np.zeros(n)])  # T_i saves its time to itself and all behind it
    rows, upper = [], []
    for i in range(n):
        worked, loaded, used = np.zeros((3, 2 * n))
        worked[: i + 1] = 1.0
        worked[:i] += 1.0  # start_i = i L - sum of the T before
        worked[n + i] = load_s + n * layers
        loaded[i] = load_s
        loaded[:i] += 1.0
        loaded[n + i] = 1.0
        used[i], used[n + i] = 1.0, -float(layers)
        rows += [worked, loaded, used]
        upper += [i * layers + n * layers, i * layers, 0.0]
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), -np.inf, np.array(upper)),
        integrality=np.ones(2 * n),
        bounds=Bounds(0, np.concatenate([np.full(n, layers), np.ones(n)])),
    )
    if not found.success:
        raise RuntimeError(f"HiGHS found no plan: {found.message}")
    return float((found.fun + layers * n * (n + 1) / 2) / n)


def waiting(count: int) -> list[PairedBatch]:
    """``count`` batches that are all there at 0."""
    return [PairedBatch(f"b{i}", 0.0, 1.0) for i in range(count)]


def mean_s(rule: PairRule, batches: list[PairedBatch], layers: int, load_s: float) -> float:
    return fmean(finish_pair(rule, batches, layers, load_s).values())


def main() -> None:
    print("| layers | batches | layer loads in | zigzag | best effort | stop |\n|---|---|---|---|---|---|")
    for layers in (7, 32):
        for count in (4, 12):
            for load_s in (1.0, 3.0, 6.0):
                best = program_mean_s(count, layers, load_s)
                ratios = [f"{mean_s(rule, waiting(count), layers, load_s) / best:.2f}" for rule in PairRule]
                print(f"| {layers} | {count} | {load_s:.0f} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
