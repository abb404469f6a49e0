"""The table of the scenes: medians and spread over repeats, and on what machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.slo.resources import machine_words
from benchmarks.slo.scene_list import CONTROL, TOKEN_BYTES, Scene
from prism.trace.report import Group, Report

Found = dict[tuple[str, str], list[tuple[Report, Path]]]
"""(Scene, variant) -> the report and folder of each repeat."""

ENOUGH = 0.98
"""Share of requests that a run without a shortage of memory must serve in time."""
_MIB = 2**20
_HEADS = ("variant", "model", "requests", "TTFT met, %", "TPOT met, %", "TTFT P50, ms", "TTFT P95, ms", "KV: most, MiB")


def table(scenes: Sequence[Scene], found: Found) -> str:
    """A section for each scene that has runs."""
    parts = [_facts([report for runs in found.values() for report, _ in runs])]
    parts += [_section(scene, found) for scene in scenes if any(name == scene.name for name, _ in found)]
    return "\n".join(parts)


def _section(scene: Scene, found: Found) -> str:
    lines = [f"### {scene.name.capitalize()}", "", scene.shows, "", f"![](replay/{scene.figure}.svg)", ""]
    lines += ["| " + " | ".join(_HEADS) + " |", "|---" * len(_HEADS) + "|"]
    for label in (*scene.variants, CONTROL):
        reports = [report for report, _ in found.get((scene.name, label), [])]
        if reports:
            lines += [_line(label, name, reports) for name in scene.names]
    sizes = f"{scene.device_mib} MiB ({scene.ample_mib} in the control)"
    loads = "; ".join(
        f"{load.model} {load.prompt}+{load.output} tokens, TTFT {load.slo.ttft_s} s, TPOT {load.slo.tpot_s} s, "
        + ", ".join(f"{rate:g}/s until {end:g} s" for _, end, rate in load.pieces)
        for load in scene.loads
    )
    lines += [
        "",
        f"Devices: {scene.devices} of {sizes}. Loads: {loads}.",
        *_moves(scene, found),
        *_cores(scene, found),
        "",
    ]
    return "\n".join(lines)


def _line(label: str, model: str, reports: Sequence[Report]) -> str:
    """One model on one side."""
    groups = [group for report in reports for group in report.models if group.name == model]
    cells = (
        spread([float(g.attainment.requests) for g in groups], 0),
        spread([100 * g.attainment.ttft for g in groups], 1),
        spread([100 * g.attainment.tpot for g in groups], 1),
        spread(_ttft_ms(groups, 50.0), 0),
        spread(_ttft_ms(groups, 95.0), 0),
        spread([_most_kv(report, model) for report in reports], 0),
    )
    return f"| {label} | {model} | " + " | ".join(cells) + " |"


def spread(values: Sequence[float], digits: int) -> str:
    """``median (least-most)``; the median alone where all are the same."""
    if not values:
        return "-"
    mid, low, high = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return mid if low == high else f"{mid} ({low}-{high})"


def _ttft_ms(groups: Iterable[Group], percentile: float) -> list[float]:
    return [1000 * g.ttft_s.at(percentile) for g in groups if g.ttft_s is not None]


def _most_kv(report: Report, model: str) -> float:
    return max((s.model_bytes.get(model, 0) for s in report.timeline.samples), default=0) / _MIB


def _cores(scene: Scene, found: Found) -> list[str]:
    """What the control says: how much memory the load wants, and whether the cores alone would do."""
    reports = [report for report, _ in found.get((scene.name, CONTROL), [])]
    samples = [sample for report in reports for sample in report.timeline.samples]
    if not samples:
        return []
    tokens = {load.model: load.prompt + load.output for load in scene.loads}
    most = max(sum(s.running.get(model, 0) * count for model, count in tokens.items()) for s in samples)
    first, wanted_mib = samples[0], most * TOKEN_BYTES / _MIB
    weights = sum(first.mapped_bytes.values()) - sum(first.model_bytes.values())
    room_mib = scene.devices * scene.device_mib - weights / _MIB
    lines = [
        f"With ample memory, requests of {wanted_mib:.0f} MiB of KV (at their full lengths) ran at once at most; the "
        f"devices have {room_mib:.0f} MiB for it."
    ]
    met = min(report.all.attainment.both for report in reports)
    if met < ENOUGH:
        lines.append(f"**Then only {100 * met:.1f}% met both objectives: the cores decide here, too (--rate).**")
    return lines


def _moves(scene: Scene, found: Found) -> list[str]:
    """How often a model came to a device during the runs, by reason."""
    lines = []
    for label in scene.variants:
        reports = [report for report, _ in found.get((scene.name, label), [])]
        counts: dict[str, int] = {}
        for report in reports:
            for residence in report.timeline.residences:
                if residence.start_s > 0:
                    counts[residence.reason] = counts.get(residence.reason, 0) + 1
        if counts:
            told = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
            lines.append(f"Activations in {len(reports)} runs, {label}: {told}.")
    return lines


def _facts(reports: Sequence[Report]) -> str:
    settings: list[Mapping[str, Any]] = [report.settings for report in reports]
    machines = dict.fromkeys(machine_words(_mapping(s.get("machine"))) for s in settings)
    revisions = dict.fromkeys(str(_mapping(s.get("machine")).get("revision")) for s in settings)
    loads = [float(s["load_average"]) for s in settings if "load_average" in s]
    lines = ["Median (least-most) over repeats, which differ in their arrivals; both sides of a repeat get the same. "
             f"*{CONTROL.capitalize()}*: the first side without a shortage, once.", ""]  # fmt: skip
    lines += [f"- Machine: {machine}." for machine in machines]
    lines += [f"- Revision: {', '.join(revisions)}."] if set(revisions) != {"None"} else []
    rates = dict.fromkeys(f"x{float(s['rate']):g}" for s in settings if s.get("rate", 1.0) != 1.0)
    lines += [f"- Rates: {', '.join(rates)} of those given below."] if rates else []
    if loads:
        lines.append(f"- Load average before the runs: {spread(loads, 1)} (the last runs are in it).")
    late = sum(any("could not keep up" in note for note in report.notes) for report in reports)
    if late:
        lines.append(f"- In {late} of {len(reports)} runs more than 1% of the requests left over 10 ms late.")
    return "\n".join(lines) + "\n"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
