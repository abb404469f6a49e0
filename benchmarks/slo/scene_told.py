"""A scene foretold by the simulator, with the devices and step times that benchmarks/sim/validate.py measured here.

As before a live run, each model is asked once, in the order of the scene: that decides who stands where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.slo.modelled import inputs
from prism.sim.run import simulate
from prism.trace.files import open_trace
from prism.trace.report import Report, Timeline, write_report
from prism.trace.report_build import build_report
from prism.trace.row import TraceRow

SAMPLE_S = 0.5
ASK_EVERY_S = 2.0


def foretell(trace: Path, names: list[str], content: dict[str, Any], measured: Path, folder: Path) -> Report:
    """Writes what a live run does, ``report.json`` and ``records.jsonl``, into ``folder``."""
    rows, shift_s = list(open_trace(trace).rows()), ASK_EVERY_S * len(names)

    def with_asks() -> Iterator[TraceRow]:
        yield from (TraceRow(index * ASK_EVERY_S, name, 5, 4) for index, name in enumerate(names))
        yield from (replace(row, arrival_s=row.arrival_s + shift_s) for row in rows)

    spec = replace(inputs(trace, content, measured, folder).spec(), rows=with_asks, sample_every_s=SAMPLE_S)
    result = simulate(spec)
    records = [
        msgspec.structs.replace(record, row=record.row - len(names), arrival_s=record.arrival_s - shift_s)
        for record in result.world.recorder.records
        if record.row >= len(names)
    ]
    seen = result.report.timeline
    samples = [msgspec.structs.replace(s, t_s=s.t_s - shift_s) for s in seen.samples if s.t_s >= shift_s]
    residences = [
        msgspec.structs.replace(r, start_s=r.start_s - shift_s, end_s=None if r.end_s is None else r.end_s - shift_s)
        for r in seen.residences
    ]
    timeline = Timeline(samples=samples, residences=residences, device_bytes=seen.device_bytes)
    report = build_report(records, kind="sim", title=spec.title, settings=spec.settings, timeline=timeline, sent=False)
    (folder / "records.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    write_report(report, folder / "report.json")
    return report
