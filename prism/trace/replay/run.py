"""One replay from plan to report: start the sender, show progress, watch the server, write the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prism.core.errors import PrismError
from prism.trace.replay.child import SenderProcess
from prism.trace.replay.machine import machine_facts
from prism.trace.replay.notes import run_notes
from prism.trace.replay.output import read_records, read_segments
from prism.trace.replay.plan import SendPlan
from prism.trace.replay.watch import Watcher, joined
from prism.trace.report import Report, Timeline, read_report, write_report
from prism.trace.report_build import build_report
from prism.trace.report_html import write_html

OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay left behind."""

    report: Report
    folder: Path
    interrupted: bool


def run_replay(
    plan: SendPlan,
    folder: Path,
    *,
    title: str,
    api_key: str | None = None,
    watcher: Watcher | None = None,
    on_progress: OnProgress = lambda _: None,
    facts: dict[str, Any] | None = None,
) -> Outcome:
    """Send ``plan`` and write ``plan.json``, ``records.jsonl``, ``report.json`` and ``report.html`` into ``folder``.
    Records that are already there (of the same plan) are kept and their requests not sent again. ``watcher`` must be
    available. Ctrl-C ends the sending; what was measured is reported and can be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    interrupted, timeline = False, Timeline()
    server = watcher.server_facts() if watcher is not None else None
    with SenderProcess(plan, folder, api_key) as sender:
        sender.ready()
        for message in sender.go():
            if "started" in message and watcher is not None:
                watcher.start(message["started"] - message["first_due_s"])
            if "progress" in message:
                on_progress(message["progress"])
            if "finished" in message:
                on_progress(message["finished"])
                interrupted = bool(message["finished"]["interrupted"])
    if watcher is not None:
        timeline = joined(_earlier_timeline(folder), watcher.stop())
    facts = {**(facts or {}), **({"server": server} if server else {})}
    missed = watcher.missed if watcher is not None else 0
    report = make_report(
        plan, folder, title=title, timeline=timeline, interrupted=interrupted, facts=facts, missed_looks=missed
    )
    return Outcome(report, folder, interrupted)


def make_report(
    plan: SendPlan,
    folder: Path,
    *,
    title: str,
    timeline: Timeline,
    interrupted: bool = False,
    facts: dict[str, Any] | None = None,
    missed_looks: int = 0,
) -> Report:
    """Build and write the report of the records in ``folder``. ``missed_looks``: how often the server could not be
    watched."""
    path = folder / "records.jsonl"
    records, segments = list(read_records(path)), read_segments(path)
    settings = {
        "plan": msgspec.to_builtins(plan),
        "started_unix_s": [s.started_unix_s for s in segments],
        "machine": machine_facts(),
        **(facts or {}),
    }
    notes = run_notes(plan, records, len(segments), interrupted)
    if missed_looks:
        notes.append(f"The server could not be looked at {missed_looks} times: the timeline has holes.")
    report = build_report(
        records, kind="replay", title=title, settings=settings, timeline=timeline, notes=notes, sent=True
    )
    write_report(report, folder / "report.json")
    write_html(report, folder / "report.html")
    return report


def _earlier_timeline(folder: Path) -> Timeline | None:
    """What an interrupted part of the same replay saw."""
    path = folder / "report.json"
    try:
        return read_report(path).timeline if path.exists() else None
    except PrismError:
        return None
