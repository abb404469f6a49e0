"""One replay from plan to report: start the sender, show progress, watch the server, write the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from prism.trace.replay.child import SenderProcess
from prism.trace.replay.machine import machine_facts
from prism.trace.replay.output import read_records, read_segments
from prism.trace.replay.plan import SendPlan
from prism.trace.replay.watch import Watcher
from prism.trace.report import Report, RequestRecord, Timeline, write_report
from prism.trace.report_build import build_report
from prism.trace.report_html import write_html

LATE_S: Final = 0.010
"""A send later than this is late; a run with more than 1% of them is said to have fallen behind."""

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
    available. KeyboardInterrupt ends the sending; what was measured is reported and can be resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    interrupted, timeline = False, Timeline()
    server = watcher.server_facts() if watcher is not None else None
    with SenderProcess(plan, folder, api_key) as sender:
        sender.ready()
        messages = sender.go()
        while True:
            try:
                message = next(messages, None)
            except KeyboardInterrupt:
                sender.interrupt()
                continue
            if message is None:
                break
            if "started" in message and watcher is not None:
                watcher.start(message["started"] - message["first_due_s"])
            if "progress" in message:
                on_progress(message["progress"])
            if "finished" in message:
                on_progress(message["finished"])
                interrupted = bool(message["finished"]["interrupted"])
    if watcher is not None:
        timeline = watcher.stop()
    facts = {**(facts or {}), **({"server": server} if server else {})}
    report = make_report(plan, folder, title=title, timeline=timeline, interrupted=interrupted, facts=facts)
    return Outcome(report, folder, interrupted)


def make_report(
    plan: SendPlan,
    folder: Path,
    *,
    title: str,
    timeline: Timeline,
    interrupted: bool = False,
    facts: dict[str, Any] | None = None,
) -> Report:
    """Build and write the report of the records in ``folder``."""
    path = folder / "records.jsonl"
    records, segments = list(read_records(path)), read_segments(path)
    settings = {
        "plan": msgspec.to_builtins(plan),
        "started_unix_s": [s.started_unix_s for s in segments],
        "machine": machine_facts(),
        **(facts or {}),
    }
    notes = _notes(records, len(segments), interrupted)
    report = build_report(
        records, kind="replay", title=title, settings=settings, timeline=timeline, notes=notes, sent=True
    )
    write_report(report, folder / "report.json")
    write_html(report, folder / "report.html")
    return report


def _notes(records: list[RequestRecord], segments: int, interrupted: bool) -> list[str]:
    notes = []
    late = sum(r.lag_s > LATE_S for r in records)
    if records and late > 0.01 * len(records):
        notes.append(
            f"The sender could not keep up: {late} of {len(records)} requests were sent more than "
            f"{LATE_S * 1000:.0f} ms late (the latest {max(r.lag_s for r in records) * 1000:.0f} ms)."
        )
    if segments > 1:
        notes.append(
            f"The replay was interrupted and resumed: {segments} segments. Models' states between them differ."
        )
    if interrupted:
        notes.append("The replay was interrupted before its end.")
    short = sum(r.server_prompt_tokens is not None and r.server_prompt_tokens != r.prompt_tokens for r in records)
    if short:
        worst = max(abs((r.server_prompt_tokens or r.prompt_tokens) - r.prompt_tokens) for r in records)
        notes.append(
            f"The server counted other prompt lengths than the trace's for {short} requests (by {worst} at most)."
        )
    return notes
