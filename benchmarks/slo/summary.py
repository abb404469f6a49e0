"""From the reports of a comparison to tables: medians and spread over repeats, and where 99% ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import msgspec

from benchmarks.slo.spec import RunSpec
from prism.trace.report import Report

TARGET = 0.99
GOODPUT = "both"
"""The figure of merit; ``ttft`` alone is the papers'."""
Results = Iterable[tuple[RunSpec, Report]]


@dataclass(frozen=True)
class Point:
    """One point of a curve: medians over repeats, with the least and the most."""

    x: float
    ttft: tuple[float, float, float]
    """Median, least, most attainment."""
    tpot: tuple[float, float, float]
    both: tuple[float, float, float]
    """Goodput: the share that met TTFT and TPOT."""
    failed: float
    tokens_per_s: float
    repeats: int


def judged(report: Report, factor: float) -> Report:
    """The same run with every objective ``factor`` times as long, which its policy did not look at: only the attainment
    of all requests changes. ``factor`` is 1 or one of :data:`prism.trace.report_build.SCALES`."""
    if factor == 1.0:
        return report
    found = next(point.attainment for point in report.by_scale if point.scale == factor)
    return msgspec.structs.replace(report, all=msgspec.structs.replace(report.all, attainment=found))


Curve = list[Point]
CurveKey = tuple[str, str, str]
"""Experiment, trace, label."""


def curves(results: Results) -> dict[CurveKey, Curve]:
    """All curves, each in order of x."""
    groups: dict[CurveKey, dict[float, list[Report]]] = defaultdict(lambda: defaultdict(list))
    for spec, report in results:
        groups[(spec.experiment, spec.trace, spec.label)][spec.x].append(report)
    return {key: [_point(x, reports) for x, reports in sorted(by_x.items())] for key, by_x in groups.items()}


def _point(x: float, reports: list[Report]) -> Point:
    groups = [r.all for r in reports]
    return Point(
        x=x,
        ttft=_spread([g.attainment.ttft for g in groups]),
        tpot=_spread([g.attainment.tpot for g in groups]),
        both=_spread([g.attainment.both for g in groups]),
        failed=median(sum(g.errors.values()) for g in groups),
        tokens_per_s=median(r.output_tokens_per_s for r in reports),
        repeats=len(reports),
    )


def _spread(values: list[float]) -> tuple[float, float, float]:
    return median(values), min(values), max(values)


def highest_rate(curve: Curve, target: float = TARGET, metric: str = GOODPUT) -> float | None:
    """The highest rate at which the median of ``metric`` is at least ``target``, interpolated between the last point
    that holds it and the first after it that does not; None when the lowest rate already misses it."""
    last: tuple[float, float] | None = None
    for point in curve:
        share: float = getattr(point, metric)[0]
        if share < target:
            if last is None:
                return None
            return last[0] + (point.x - last[0]) * (last[1] - target) / (last[1] - share)
        last = point.x, share
    return last[0] if last else None


def lowest_scale(curve: Curve, target: float = TARGET, metric: str = GOODPUT) -> float | None:
    """The least x (SLO scale, number of devices) from which on the median of ``metric`` is at least ``target``."""
    found = None
    for point in reversed(curve):
        if getattr(point, metric)[0] < target:
            break
        found = point.x
    return found


def markdown(results: Results) -> str:
    """Tables of every experiment, as they go into docs/results."""
    found = curves(results)
    parts = []
    for experiment in ("rate", "scale", "devices", "ablation"):
        for trace in sorted({t for e, t, _ in found if e == experiment}):
            chosen = {label: curve for (e, t, label), curve in found.items() if (e, t) == (experiment, trace)}
            parts.append(f"### {_TITLES[experiment]}: {trace}\n\n{_table(experiment, chosen)}\n")
    return "\n".join(parts)


_TITLES = {
    "rate": "Attainment over request rate",
    "scale": "Attainment over SLO scale",
    "devices": "Attainment over number of devices",
    "ablation": "Parts switched off",
}


def _table(experiment: str, chosen: Mapping[str, Curve]) -> str:
    xs = sorted({point.x for curve in chosen.values() for point in curve})
    ablation = experiment == "ablation"
    heads = ["goodput", "TTFT met", "TPOT met", "failed", "tokens/s"] if ablation else [f"x{x:g}" for x in xs]
    side = "up to" if experiment == "rate" else "from"
    edges = [] if ablation else [f"99% {what} {side}" for what in _EDGES.values()]
    lines = ["| policy | " + " | ".join([*heads, *edges]) + " |"]
    lines.append("|---" * (1 + len(heads) + len(edges)) + "|")
    for label, curve in chosen.items():
        if ablation:
            p = curve[0]
            cells = [_share(p.both), _share(p.ttft), _share(p.tpot), f"{p.failed:g}", f"{p.tokens_per_s:.0f}"]
        else:
            by_x = {p.x: p for p in curve}
            cells = [_shares(by_x[x]) if x in by_x else "-" for x in xs]
            find = highest_rate if experiment == "rate" else lowest_scale
            found = [find(curve, TARGET, metric) for metric in _EDGES]
            cells += ["-" if edge is None else f"x{edge:.2f}" for edge in found]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    note = "" if ablation else "\nCells: goodput; TTFT met / TPOT met, median (least-most) over repeats, in percent."
    return "\n".join(lines) + "\n" + note


_EDGES = {GOODPUT: "goodput", "ttft": "TTFT"}


def _shares(point: Point) -> str:
    return f"{_share(point.both)}; {_share(point.ttft)} / {_share(point.tpot)}"


def _share(values: tuple[float, float, float]) -> str:
    mid, least, most = (100 * v for v in values)
    return f"{mid:.1f}" if most - least < 0.05 else f"{mid:.1f} ({least:.1f}-{most:.1f})"
