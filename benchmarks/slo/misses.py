"""What the requests that missed their TTFT objective waited for, as far as the client's records and the once-a-second
looks at the server tell."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.slo.spec import RunSpec
from prism.trace.replay.output import read_records
from prism.trace.report import Report, RequestRecord, Timeline

CAUSES = ("failed", "not loaded", "waiting", "in its engine", "unknown")
_NOTE = (
    "Of the requests (all repeats together) that missed their TTFT objective, how many *failed*; were sent when their "
    "model was ready on no device (*not loaded*); or else had requests of their model *waiting* for a place in an "
    "engine around them. The others were *in their engine*: in its own queue, in a prefill beside others, or short of "
    "a core. The server was looked at once a second, so single requests may be sorted wrongly."
)


def cause(record: RequestRecord, timeline: Timeline) -> str:
    """Why ``record``, which missed its TTFT objective, did so: one of :data:`CAUSES`."""
    if record.error:
        return "failed"
    if not timeline.samples:
        return "unknown"
    sent_s = record.arrival_s + record.lag_s
    first_s = sent_s + (record.ttft_s or 0.0)
    stays = [s for s in timeline.residences if s.model == record.model and s.ready_s is not None]
    if not any((s.ready_s or 0.0) <= sent_s and (s.end_s is None or s.end_s > sent_s) for s in stays):
        return "not loaded"
    before = [s for s in timeline.samples if s.t_s <= sent_s][-1:]
    after = [s for s in timeline.samples if s.t_s >= first_s][:1]
    during = [s for s in timeline.samples if sent_s < s.t_s < first_s]
    waiting = any(s.queued.get(record.model, 0) > 0 for s in (*before, *during, *after))
    return "waiting" if waiting else "in its engine"


def causes(report: Report, records: Iterable[RequestRecord]) -> Counter[str]:
    """How many missed their TTFT objective for each cause, and under ``requests`` how many there were."""
    found: Counter[str] = Counter()
    for record in records:
        found["requests"] += 1
        if not record.met_ttft():
            found[cause(record, report.timeline)] += 1
    return found


def misses(results: Iterable[tuple[RunSpec, Report]], runs: Path) -> str:
    """A table over policies and rates of each trace, from the records in the folders under ``runs``; empty when there
    are none (modelled runs keep none)."""
    counted: dict[tuple[str, str, float], Counter[str]] = defaultdict(Counter)
    for spec, report in results:
        records = runs / spec.folder / "records.jsonl"
        if spec.experiment == "rate" and records.exists():
            counted[spec.trace, spec.label, spec.rate] += causes(report, read_records(records))
    parts = []
    for trace in sorted({key[0] for key in counted}):
        chosen = {key[1:]: value for key, value in counted.items() if key[0] == trace}
        parts.append(f"### Where TTFT misses come from: {trace}\n\n{_table(chosen)}")
    return "\n".join([*parts, _NOTE, ""]) if parts else ""


def _table(chosen: dict[tuple[str, float], Counter[str]]) -> str:
    shown = [name for name in CAUSES if any(counts[name] for counts in chosen.values())]
    lines = ["| policy | rate | requests | missed | " + " | ".join(shown) + " |", "|---" * (4 + len(shown)) + "|"]
    labels = list(dict.fromkeys(label for label, _ in chosen))
    for label, rate in sorted(chosen, key=lambda key: (labels.index(key[0]), key[1])):
        counts = chosen[label, rate]
        missed = sum(counts[name] for name in CAUSES)
        cells = [f"{counts[name]}" for name in shown]
        share = 100 * missed / counts["requests"]
        lines.append(f"| {label} | x{rate:g} | {counts['requests']} | {missed} ({share:.1f}%) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
