"""The highest rate within the objectives: Prism's over each rival's, as the Prism paper compares them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from benchmarks.slo.summary import GOODPUT, Curve, CurveKey, highest_rate

TARGETS = (0.99, 0.95, 0.9)
METRICS = {GOODPUT: "goodput", "ttft": "TTFT"}
OURS = "prism"


@dataclass(frozen=True)
class Reach:
    """How far a policy holds a target over the measured rates. ``below``: it misses it at the lowest one, which is then
    ``rate``. ``beyond``: it holds it at the highest one, which is then ``rate``."""

    rate: float
    below: bool = False
    beyond: bool = False

    def __str__(self) -> str:
        return f"{'< ' if self.below else '>= ' if self.beyond else ''}x{self.rate:.2f}"


def reach(curve: Curve, target: float, metric: str = GOODPUT) -> Reach:
    """The reach of a curve over rates, which must not be empty."""
    rate = highest_rate(curve, target, metric)
    if rate is None:
        return Reach(curve[0].x, below=True)
    return Reach(rate, beyond=all(getattr(point, metric)[0] >= target for point in curve))


def ratio(ours: Reach, theirs: Reach) -> str:
    """Our rate over theirs; with ``>`` or ``<`` where one of them lies outside what was measured."""
    if (ours.below and theirs.below) or (ours.beyond and theirs.beyond):
        return "-"
    sign = "> " if ours.beyond or theirs.below else "< " if ours.below or theirs.beyond else ""
    return f"{sign}{ours.rate / theirs.rate:.2f}x"


def margins(found: Mapping[CurveKey, Curve]) -> str:
    """The table; empty without rates of Prism and a rival."""
    curves = {(trace, label): curve for (experiment, trace, label), curve in found.items() if experiment == "rate"}
    traces = sorted({trace for trace, label in curves if label == OURS})
    rivals = [label for label in dict.fromkeys(label for _, label in curves) if label != OURS]
    if not traces or not rivals:
        return ""
    lines = ["| trace | met | prism up to | " + " | ".join(f"over {rival}" for rival in rivals) + " |"]
    lines.append("|---" * (3 + len(rivals)) + "|")
    for trace in traces:
        for metric, target in product(METRICS, TARGETS):
            ours = reach(curves[trace, OURS], target, metric)
            reaches = [reach(curves[trace, r], target, metric) if curves.get((trace, r)) else None for r in rivals]
            cells = ["-" if theirs is None else f"{ratio(ours, theirs)} ({theirs})" for theirs in reaches]
            lines.append(f"| {trace} | {METRICS[metric]} {100 * target:.0f}% | {ours} | " + " | ".join(cells) + " |")
    note = (
        "Highest rate at which the median share holds, interpolated between measured rates, and how many "
        "times each rival's that is (the rival's in brackets). `>=`: held at the highest rate measured; `<`: missed at "
        "the lowest; `-`: nothing to compare, both do the same."
    )
    return "### Prism's highest rate over each rival's\n\n" + "\n".join(lines) + f"\n\n{note}\n"
