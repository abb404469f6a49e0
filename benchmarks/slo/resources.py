"""On what the policies were compared, and what they did with it: machine, device memory, activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from benchmarks.slo.spec import RunSpec, Setup
from prism.trace.report import Report

_MIB = 2**20
Results = Iterable[tuple[RunSpec, Report]]


def facts(results: Results, setup: Setup, sources: Mapping[str, str]) -> str:
    """Lines about traces, machine, devices and objectives."""
    reports = list({spec.folder: report for spec, report in results}.values())
    settings = [report.settings for report in reports]
    machines = _distinct(machine_words(_mapping(s.get("machine"))) for s in settings)
    revisions = _distinct(str(_mapping(s.get("machine")).get("revision")) for s in settings)
    lines = [f"- Trace `{name}`: {source}." for name, source in sorted(sources.items())]
    lines += [f"- Machine: {machine}." for machine in machines]
    lines += [f"- Revision: {', '.join(revisions)}."] if any(r != "None" for r in revisions) else []
    lines.append(
        f"- {setup.models} models on virtual devices of {setup.device_mib} MiB; windows of {setup.seconds:g} s; rate "
        f"x1 is {setup.base_rps:g} requests/s over the trace; objectives x{setup.base_scale:g} unless swept."
    )
    late = sum(any("could not keep up" in note for note in report.notes) for report in reports)
    if late:
        lines.append(f"- In {late} of {len(reports)} runs more than 1% of the requests left over 10 ms late.")
    return "\n".join(lines) + "\n"


def resources(results: Results, setup: Setup) -> str:
    """What each policy used at the base point; empty without runs there that were watched."""
    base = (setup.base_rate, setup.base_scale, setup.base_devices)
    groups: dict[tuple[str, str], list[Report]] = defaultdict(list)
    for spec, report in results:
        if spec.experiment == "rate" and (spec.rate, spec.scale, spec.devices) == base and report.timeline.samples:
            groups[spec.trace, spec.label].append(report)
    if not groups:
        return ""
    heads = (
        "trace", "policy", "device memory, MiB", "in use: mean", "in use: most", "KV: mean", "activations per run",
        "output tokens/s",
    )  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    lines += [f"| {trace} | {label} | {_row(reports)} |" for (trace, label), reports in sorted(groups.items())]
    note = (
        "At the base point, over the time in which requests arrived; median over repeats. In use: weights and KV "
        "mapped on all devices together, looked at once a second."
    )
    return "### Memory and activations\n\n" + "\n".join(lines) + f"\n\n{note}\n"


def _row(reports: list[Report]) -> str:
    totals, most, kv, activations = [], [], [], []
    for report in reports:
        end_s = report.windows[-1].start_s + report.window_s if report.windows else report.span_s
        samples = [s for s in report.timeline.samples if 0 <= s.t_s <= end_s] or report.timeline.samples
        used = [sum(s.mapped_bytes.values()) / _MIB for s in samples]
        totals.append(sum(used) / len(used))
        most.append(max(used))
        kv.append(sum(sum(s.model_bytes.values()) for s in samples) / len(samples) / _MIB)
        activations.append(sum(0 < stay.start_s <= end_s for stay in report.timeline.residences))
    capacity = median(sum(r.timeline.device_bytes.values()) / _MIB for r in reports)
    tokens = median(r.output_tokens_per_s for r in reports)
    return (
        f"{capacity:.0f} | {median(totals):.0f} | {median(most):.0f} | {median(kv):.0f} | {median(activations):g} | "
        f"{tokens:.0f}"
    )


def machine_words(facts: Mapping[str, Any]) -> str:
    """The machine of a report, in words."""
    if not facts:
        return "modelled"
    memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB" if facts.get("memory_bytes") else "?"
    versions = f"Python {facts.get('python')}, SGLang {facts.get('sglang')}"
    groups = "" if facts.get("autogroups") is None else f", autogroups {'on' if facts['autogroups'] else 'off'}"
    return f"{facts.get('cores')} cores, {memory}, {versions}{groups}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))
