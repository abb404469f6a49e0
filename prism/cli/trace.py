"""``prism trace``: convert, generate, transform and describe request traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from prism.cli.output import json_option, print_json, print_table
from prism.cli.trace_options import steps_of, transform_options
from prism.core.errors import InvalidValue
from prism.trace.convert import CONVERTERS, ConvertOptions, convert
from prism.trace.files import open_trace, write_trace
from prism.trace.generate import PRESETS, GeneratorSpec, generate, preset, shortened
from prism.trace.lengths import TABLES
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
from prism.trace.stats import ModelStats, TraceStats, trace_stats
from prism.trace.stats_view import summary_rows, write_figure
from prism.trace.steps import apply_steps, count_models, info_after
from prism.trace.transform import fold

FILE = click.Path(path_type=Path)


@click.group("trace")
def command() -> None:
    """Convert, generate, transform and describe request traces (.parquet or .jsonl)."""


@command.command("convert")
@click.argument("format", type=click.Choice(list(CONVERTERS)))
@click.argument("source", type=FILE)
@click.argument("output", type=FILE)
@click.option("--model", default="", help="Name for the model of sources that name none.")
@click.option("--tokenizer", type=FILE, help="tokenizer.json to count tokens of texts with (ShareGPT).")
@click.option("--chars-per-token", type=float, help="Estimate tokens instead of counting them (ShareGPT).")
@click.option("--rate-rps", type=float, help="Conversations per second (ShareGPT has no times).")
@click.option(
    "--cv", type=float, default=1.0, show_default=True, help="CV of the gaps between conversations (ShareGPT)."
)
@click.option("--think", "think_s", type=float, default=15.0, show_default=True, help="Mean seconds between turns.")
@click.option("--seed", type=int, default=0, show_default=True)
def convert_command(format: str, source: Path, output: Path, **options: Any) -> None:
    """Convert a public original into the trace format. Nothing in SOURCE is ever executed."""
    rows, info, tally = convert(format, source, ConvertOptions(**options))
    written = write_trace(output, rows, info)
    left_out = "".join(f"; left out {count:,} ({reason})" for reason, count in tally.dropped.items())
    click.echo(f"{output}: {written:,} requests{left_out}")


@command.command("generate")
@click.argument("output", type=FILE)
@click.option("--preset", "preset_name", type=click.Choice(list(PRESETS)), default="hyperbolic", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--models", type=int, help="Number of models.")
@click.option("--names", help="Their names, most popular first (comma-separated).")
@click.option("--duration", "duration_s", type=float, help="Seconds.")
@click.option("--rate-rps", type=float, help="Requests per second, all models together.")
@click.option("--zipf", type=float, help="Popularity exponent.")
@click.option("--sigma", type=float, help="Popularity as log-normal rates with this sigma (instead of Zipf).")
@click.option("--groups", type=int, help="Groups of models that are active together.")
@click.option("--on", "on_s", type=float, help="Mean seconds a group is active.")
@click.option("--off", "off_s", type=float, help="Mean seconds a group is nearly idle.")
@click.option("--off-level", type=float, help="Intensity while nearly idle, relative to the mean while active.")
@click.option("--level-sigma", type=float, help="Spread (of the logarithm) of the intensity between active periods.")
@click.option("--cv-median", type=float, help="Median over models of the CV of gaps while active.")
@click.option("--cv-p90", type=float, help="P90 of the same.")
@click.option("--lengths", type=click.Choice(list(TABLES)), help="Table of prompt and output lengths.")
def generate_command(output: Path, preset_name: str, seed: int, names: str | None, **changes: Any) -> None:
    """Generate a trace fitted to published facts; options override the preset."""
    given = {name: value for name, value in changes.items() if value is not None}
    if names:
        given["names"] = tuple(name.strip() for name in names.split(","))
        given["models"] = len(given["names"])
    if "sigma" in given:
        given["zipf"] = None
    spec: GeneratorSpec = replace(shortened(preset(preset_name), given), **given)
    settings = {field.name: getattr(spec, field.name) for field in fields(spec)}
    info = TraceInfo({"generator": "prism trace generate", "preset": preset_name, "seed": seed, "spec": settings})
    seen: Counter[str] = Counter()
    written = write_trace(output, _counted(generate(spec, seed), seen), info)
    click.echo(f"{output}: {written:,} requests of {len(seen)} models")
    if absent := [name for name in spec.model_names() if name not in seen]:
        why = f"the least popular of {spec.models} models, or idle for all of these {spec.duration_s:g} s"
        hint = "more --duration, --rate-rps or --off-level, a lower --zipf, or another --seed"
        click.echo(f"no requests of {_listed(absent)}: {why}; {hint} changes that", err=True)


def _counted(rows: Iterable[TraceRow], seen: Counter[str]) -> Iterator[TraceRow]:
    for row in rows:
        seen[row.model] += 1
        yield row


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@command.command("transform")
@click.argument("source", type=FILE)
@click.argument("output", type=FILE)
@transform_options
@click.option("--onto", help="Fold the models onto these fewer ones (comma-separated).")
@click.option("--fold", "how", type=click.Choice(["rank", "balance"]), default="rank", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def transform_command(source: Path, output: Path, onto: str | None, how: str, seed: int, **values: Any) -> None:
    """Write a changed copy of a trace: window, rate, time, lengths, models."""
    trace, steps = open_trace(source), steps_of(values, seed)
    if onto:
        counts = count_models(apply_steps(trace.rows(), steps))
        steps.append({"step": "models", "names": fold(counts, [name.strip() for name in onto.split(",")], how)})
    written = write_trace(output, apply_steps(trace.rows(), steps), info_after(trace.info, steps))
    click.echo(f"{output}: {written:,} requests")


@command.command("stats")
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--figure", type=FILE, help="Also draw the paper's Figure 2 into this .svg file.")
@click.option("--models", "show_models", is_flag=True, help="Also list the models.")
@json_option
def stats_command(files: tuple[Path, ...], figure: Path | None, show_models: bool, as_json: bool) -> None:
    """Popularity, idle intervals, variability per minute and rate changes of one or more traces.

    Spreads are P10 / P50 / P90 over the models.
    """
    found = [(file.stem, _stats(file)) for file in files]
    if figure is not None:
        write_figure(figure, found)
    if as_json:
        print_json({name: msgspec.to_builtins(stats) for name, stats in found})
        return
    for name, stats in found:
        print_table((name, "~"), summary_rows(stats), "no requests")
        click.echo("")
        if show_models:
            _print_models(stats)


def _stats(file: Path) -> TraceStats:
    """Raises :class:`InvalidValue` for a trace without requests."""
    stats = trace_stats(open_trace(file).rows())
    if not stats.requests:
        raise InvalidValue("file", str(file), "has no requests")
    if stats.in_milliseconds:
        click.echo(
            f"{file}: the times look like milliseconds ({stats.span_s:,.0f} s for {stats.requests:,} requests, all of "
            "them whole numbers); if they are: `prism trace transform --time 0.001`",
            err=True,
        )
    return stats


def _print_models(stats: TraceStats) -> None:
    columns = (
        "model",
        "requests>",
        "share>",
        "idle median s>?1",
        "idle/h>?4",
        "CV/min>?5",
        "gap CV>?2",
        "rate change>?3",
    )
    print_table(columns, [_model_row(model) for model in stats.models], "no models")
    click.echo("")


def _model_row(model: ModelStats) -> tuple[str, ...]:
    numbers = (model.idle_median_s, model.idle_per_hour, model.cv_per_minute, model.gap_cv, model.rate_change)
    shown = ("-" if number is None else f"{number:.3g}" for number in numbers)
    return (model.model or "(unnamed)", f"{model.requests:,}", f"{100 * model.share:.1f}%", *shown)
