"""Tables of comparisons that run every policy on fleets of several sizes: shares met over GPUs, and from how many on
99% are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.sim.pieces import Pieces
from benchmarks.sim.plots import crossing, show

METRICS: Final = {"both": "goodput", "ttft": "TTFT", "tpot": "TPOT"}

Found = Mapping[str, Mapping[int, Sequence[dict[str, Any]]]]
"""By policy and draw, those that are complete: a piece for every fleet, with a share for each of :data:`METRICS` and
``never_ended``."""


def finished(
    pieces: Pieces,
    name_of: Callable[[int, str, int], str],
    draws: Sequence[int],
    policies: Sequence[str],
    fleets: Sequence[int],
) -> Found:
    """What is done; ``name_of`` a draw, a policy and a number of GPUs is the name of their piece."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for policy in policies:
        for draw in draws:
            done = [piece for gpus in fleets if (piece := pieces.get(name_of(draw, policy, gpus))) is not None]
            if len(done) == len(fleets):
                found.setdefault(policy, {})[draw] = done
    return found


def curves(
    runs: Mapping[int, Sequence[dict[str, Any]]], metric: str, fleets: Sequence[int]
) -> list[list[tuple[float, float]]]:
    """Of each draw, the share met over the number of GPUs."""
    return [[(float(g), p[metric]) for g, p in zip(fleets, done, strict=True)] for done in runs.values()]


def print_tables(found: Found, fleets: Sequence[int]) -> None:
    """Medians over the draws, for each metric."""
    for metric, title in METRICS.items():
        print(f"\n| {title}, GPUs | " + " | ".join(map(str, fleets)) + " | 99% from (draws) | never ended |")
        print("|---" * (len(fleets) + 3) + "|")
        for policy, runs in found.items():
            of_draws = curves(runs, metric, fleets)
            shares = " | ".join(f"{median(curve[i][1] for curve in of_draws):.3f}" for i in range(len(fleets)))
            ends = ", ".join(show(crossing(curve)) for curve in of_draws)
            print(f"| {policy} | {shares} | {ends} | {sum(p['never_ended'] for done in runs.values() for p in done)} |")
