"""How the verbs of ``prism sim`` print."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
import msgspec

from prism.cli import output
from prism.core.errors import InvalidValue
from prism.sim.capacity import Capacity
from prism.sim.dry_run import DryRun
from prism.sim.gpus import GPUS
from prism.sim.recorder import NEVER_ENDED
from prism.sim.run import SimResult
from prism.sim.sweep import Point
from prism.trace.report import Group, write_report
from prism.trace.report_html import write_html

_MODELS_SHOWN = 60
_GROUP_COLUMNS = (
    "MODEL",
    "REQUESTS>",
    "GOODPUT>",
    "TTFT OK>",
    "TPOT OK>",
    "TTFT P50>?2",
    "TTFT P99>?3",
    "TPOT P50>?1",
    "TPOT P99>?4",
    "ERRORS>",
    "NEVER ENDED>",
)


class ProgressLine:
    """One line on a terminal that is rewritten; nothing when the error stream is no terminal."""

    def __init__(self, last_s: float | None = None) -> None:
        """``last_s``: when the last request of a trace comes, if that is known."""
        self._last_s, self._shown_s, self._on = last_s, 0.0, sys.stderr.isatty()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown_s:
            click.echo("\r\x1b[K", err=True, nl=False)

    def update(self, simulated_s: float, ended: int) -> None:
        """The trace stands at ``simulated_s``; ``ended`` requests are done."""
        if time.monotonic() - self._shown_s > 0.2:
            of = "" if self._last_s is None else f" of {self._last_s:,.0f}"
            self._show(f"simulated {max(simulated_s, 0.0):,.0f}{of} s, {ended:,} requests")

    def runs(self, done: int, all: int) -> None:
        """``done`` of ``all`` runs of a sweep are finished."""
        self._show(f"{done} of {all} runs")

    def trying(self, gpus: int) -> None:
        """A search for the fewest GPUs tries so many."""
        self._show(f"trying {gpus} GPUs")

    def rate(self, model: str, rate_rps: float) -> None:
        """A profile tries ``model`` at so many requests a second."""
        self._show(f"{model} at {rate_rps:g} requests/s")

    def _show(self, text: str) -> None:
        if self._on:
            self._shown_s = time.monotonic()
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)


def check_outputs(out: Path | None, decisions: Path | None) -> None:
    """Before a run, so that none is lost: folders are made. Raises :class:`InvalidValue` for what cannot be written."""
    if out is not None and out.suffix == ".html":
        raise InvalidValue("out", str(out), "names the report (JSON); its page is written beside it, ending in .html")
    for key, file in (("out", out), ("decisions", decisions)):
        try:
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.open("a").close()
        except OSError as error:
            raise InvalidValue(key, str(file), f"cannot be written: {error.strerror or error}") from error


@contextmanager
def decision_file(path: Path | None) -> Iterator[Callable[[str], None] | None]:
    """A sink that writes lines to ``path``; None without one."""
    if path is None:
        yield None
        return
    with path.open("w", encoding="utf-8") as stream:
        yield lambda line: print(line, file=stream)


def write_outputs(result: SimResult, out: Path | None) -> None:
    """The report as JSON and as a page beside it."""
    if out is not None:
        write_report(result.report, out)
        write_html(result.report, out.with_suffix(".html"))


def print_summary(result: SimResult, as_json: bool) -> None:
    """The run in a table, or the whole report as JSON."""
    if as_json:
        click.echo(msgspec.json.encode(result.report).decode())
        return
    report, stats = result.report, result.stats
    click.echo(report.title)
    rows = [_row(group) for group in [*report.models[:_MODELS_SHOWN], report.all]]
    output.print_table(_GROUP_COLUMNS, rows, "no requests")
    hidden = len(report.models) - _MODELS_SHOWN
    if hidden > 0:
        click.echo(f"({hidden} more models; see --json or --out)")
    click.echo(
        f"{stats.simulated_s:,.0f} s simulated in {stats.wall_s:.1f} s ({stats.times_real:,.0f}x), "
        f"{stats.activations} activations, {report.output_tokens_per_s:,.0f} output tokens/s"
        f"{f', engines stood still for {stats.held_s:,.1f} s' if stats.held_s else ''}"
    )
    if report.all.errors:
        click.echo("errors: " + ", ".join(f"{count:,} {code}" for code, count in sorted(report.all.errors.items())))
    for note in report.notes:
        click.echo(f"note: {note}")


def _row(group: Group) -> tuple[str, ...]:
    attained = group.attainment
    return (
        group.name,
        str(attained.requests),
        output.share(attained.both),
        output.share(attained.ttft),
        output.share(attained.tpot),
        _ms(group.ttft_s.at(50.0) if group.ttft_s else None),
        _ms(group.ttft_s.at(99.0) if group.ttft_s else None),
        _ms(group.tpot_s.at(50.0) if group.tpot_s else None),
        _ms(group.tpot_s.at(99.0) if group.tpot_s else None),
        str(sum(group.errors.values())),
        str(group.errors.get(NEVER_ENDED, 0)),
    )


def _ms(value_s: float | None) -> str:
    """Milliseconds with a tenth: serving times are short."""
    return "-" if value_s is None else f"{value_s * 1e3:,.1f}ms"


def print_sweep(points: Sequence[Point], as_json: bool) -> None:
    """One line per run."""
    if as_json:
        output.print_json([p.as_dict() for p in points])
        return
    columns = (
        "POLICY",
        "GPUS>",
        "RATE>",
        "SLO>",
        "GOODPUT>",
        "TTFT OK>",
        "TPOT OK>",
        "NEVER ENDED>",
        "TTFT P50>?1",
        "TTFT P99>?2",
        "ACTIVATIONS>?3",
    )
    rows = [
        (
            p.policy,
            str(p.gpus),
            f"{p.rate:g}",
            f"{p.slo_scale:g}",
            output.share(p.both),
            output.share(p.ttft),
            output.share(p.tpot),
            str(p.never_ended),
            _ms(p.ttft_p50_s),
            _ms(p.ttft_p99_s),
            str(p.activations),
        )
        for p in points
    ]
    output.print_table(columns, rows, "no runs")


def print_capacity(found: Capacity, as_json: bool) -> None:
    """The answer and the runs behind it."""
    if as_json:
        output.print_json(asdict(found))
        return
    print_sweep(found.tried, False)
    goal = f"{found.target:.1%} {'goodput' if found.metric == 'both' else found.metric + ' attainment'}"
    most = max(p.gpus for p in found.tried)
    click.echo(f"{goal}: {found.gpus} GPUs" if found.gpus else f"{goal}: not reached with {most} GPUs")


def print_dry_run(found: DryRun, as_json: bool) -> None:
    """What would be done, in order."""
    if as_json:
        output.print_json(found.as_dict())
        return
    rows = [(f"{a.at_s:.1f}s", a.action, a.model, ",".join(a.devices), a.reason) for a in found.actions]
    nothing = f"policy {found.policy}: nothing to do within {found.horizon_s:g} s"
    output.print_table(("AT>", "ACTION", "MODEL", "DEVICES", "WHY~"), rows, nothing)
    if found.requests:
        shares = f"goodput {output.share(found.both)}, TTFT {output.share(found.ttft)}, TPOT {output.share(found.tpot)}"
        click.echo(f"policy {found.policy}: {found.requests} requests expected in {found.horizon_s:g} s, {shares}")
    for note in found.notes:
        click.echo(f"note: {note}")


def print_gpus(as_json: bool) -> None:
    """The table of GPUs."""
    if as_json:
        output.print_json([asdict(gpu) for gpu in GPUS.values()])
        return
    columns = ("GPU", "MEMORY>", "TFLOPS>", "MEMORY GB/S>", "NVLINK GB/S>", "PCIE GB/S>?1")
    rows = [
        (
            gpu.name,
            output.size(gpu.memory_bytes),
            f"{gpu.flops / 1e12:g}",
            f"{gpu.memory_bytes_per_s / 1e9:g}",
            f"{gpu.nvlink_bytes_per_s / 1e9:g}",
            f"{gpu.pcie_bytes_per_s / 1e9:g}",
        )
        for gpu in GPUS.values()
    ]
    output.print_table(columns, rows, "no GPUs")
