"""How near does ZigZag's queue come to the integer program it stands for, and what do best effort and stopping cost?

Batches that all wait when loading begins, and batches that arrive while it goes on, a layer of each taking 1; a further
layer loads in 1, 3 or 6. The program is BlitzScale's (5.2), solved by HiGHS; it knows all arrivals in advance.

    python -m benchmarks.live.zigzag

Results: docs/results/live-scaling.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import numpy.typing as npt
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


def arriving_program_mean_s(arrivals_s: Sequence[float], layers: int, load_s: float) -> float:
    """The same for batches that come at ``arrivals_s`` (not decreasing), both instances taking them in that order: T_i,
    whether it is not 0 (u_i), when the new one has done them (e_i) and when the old one begins (s_i)::

        minimise   sum_i s_i + L - T_i
                   e_i >= arrival_i + T_i;  e_i >= e_{i-1} + T_i
        C3         e_i >= load * T_i + 1                             if u_i: its last layer was there in time
                   s_i >= arrival_i;  s_i >= s_{i-1} + L - T_{i-1}
        C2         s_i >= e_i                                        if u_i
    """
    n, late = len(arrivals_s), float(arrivals_s[-1] + (len(arrivals_s) + load_s) * layers)
    rows: list[npt.NDArray[np.float64]] = []
    least: list[float] = []

    def need(at_least: float, **terms: tuple[int, float]) -> None:
        row = np.zeros(4 * n)
        for name, term in terms.items():
            row["Tues".index(name[0]) * n + term[0]] += term[1]
        rows.append(row)
        least.append(at_least)

    for i, arrival_s in enumerate(arrivals_s):
        need(arrival_s, e=(i, 1.0), T=(i, -1.0))
        need(0.0, u=(i, float(layers)), T=(i, -1.0))
        need(1.0 - late, e=(i, 1.0), T=(i, -load_s), u=(i, -late))
        need(arrival_s, s=(i, 1.0))
        need(-late, s=(i, 1.0), e=(i, -1.0), u=(i, -late))
        if i:
            need(0.0, e=(i, 1.0), e_before=(i - 1, -1.0), T=(i, -1.0))
            need(float(layers), s=(i, 1.0), s_before=(i - 1, -1.0), T=(i - 1, 1.0))
    cost = np.concatenate([-np.ones(n), np.zeros(2 * n), np.ones(n)])
    upper = np.concatenate([np.full(n, float(layers)), np.ones(n), np.full(2 * n, 2 * late)])
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), np.array(least), np.inf),
        integrality=np.concatenate([np.ones(2 * n), np.zeros(2 * n)]),
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 1e-4},
    )
    if not found.success:
        raise RuntimeError(f"HiGHS found no plan: {found.message}")
    return float(found.fun / n + layers)


def evenly(count: int, layers: int, times: float) -> list[PairedBatch]:
    """``count`` batches, ``times`` as many as one instance serves."""
    return [PairedBatch(f"b{i}", i * layers / times, 1.0) for i in range(count)]


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
    print("\n| layers | load | layer loads in | zigzag | best effort | stop |\n|---|---|---|---|---|---|")
    for layers in (7, 16):
        for times in (1.3, 1.8):
            for load_s in (1.0, 3.0, 6.0):
                batches = evenly(10, layers, times)
                came_s = fmean(b.arrival_s for b in batches)
                best = arriving_program_mean_s([b.arrival_s for b in batches], layers, load_s) - came_s
                ratios = [f"{(mean_s(rule, batches, layers, load_s) - came_s) / best:.2f}" for rule in PairRule]
                print(f"| {layers} | {times} times one | {load_s:.0f} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
