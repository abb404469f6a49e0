"""``prism replay``: send a trace's requests to a server at their times and measure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from prism.cli.errors import CliError, Exit
from prism.cli.output import json_option, print_json, print_table, seconds, share
from prism.cli.trace_options import steps_of, transform_options
from prism.config.catalog import load_catalog
from prism.core.errors import InvalidValue
from prism.trace.replay.again import differences, kept_plan, reported_plan, with_trace
from prism.trace.replay.calibrate import calibrate
from prism.trace.replay.plan import API_KEY_VARIABLE, Objective, SendPlan, read_objectives
from prism.trace.replay.planning import ReplayOptions, count_requests, make_plan
from prism.trace.replay.progress import LiveProgress
from prism.trace.replay.run import Outcome, run_replay
from prism.trace.replay.watch import Watcher
from prism.trace.report import Group

FILE = click.Path(path_type=Path)

_ANY_TIME = frozenset(
    ("trace", "out", "resume", "repeat", "url", "api_key", "admin_key", "title", "watch", "timeout_s", "as_json")
)
"""What may be given anew when a replay goes on or is repeated; everything else is in its plan."""


@click.command("replay")
@click.argument("trace", type=FILE)
@click.option("--url", envvar="PRISM_URL", default="http://127.0.0.1:8000", show_default=True, help="Server.")
@click.option("--key", "api_key", envvar=API_KEY_VARIABLE, help="API key (better in the environment).")
@click.option("--admin-key", envvar="PRISM_ADMIN_KEY", help="Key for watching a Prism server; without it, --key.")
@click.option("--out", type=FILE, help="Folder for records, report and page.  [default: replay-TIME]")
@click.option("--resume", is_flag=True, help="Go on with an interrupted replay in --out.")
@click.option("--repeat", type=FILE, metavar="REPORT", help="Send what the run of this report.json sent.")
@click.option("--title", help="Title of the report.")
@click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True)
@click.option("--onto", help="Fold the trace's models onto these served ones (comma-separated).")
@click.option("--fold", "how", type=click.Choice(["rank", "balance"]), default="rank", show_default=True)
@click.option("--slo", type=FILE, help="Objectives, as --calibrate writes them.")
@click.option("--catalog", type=FILE, help="Take objectives and tokenizers from this Prism catalog.")
@click.option("--slo-ttft", type=float, help="TTFT objective in seconds for models that have none.")
@click.option("--slo-tpot", type=float, help="TPOT objective in seconds for models that have none.")
@click.option("--slo-scale", type=float, default=1.0, show_default=True, help="Multiply all objectives.")
@click.option("--tokenizer", "tokenizers", multiple=True, metavar="MODEL=PATH", help="A model's tokenizer.json.")
@click.option("--probe/--no-probe", default=None, help="Ask the server how it counts tokens.  [default: where needed]")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Ask for exactly the trace's output lengths.")
@click.option("--extra", help="JSON object added to every request.")
@click.option("--limit", type=int, help="Only the first so many requests (with --calibrate: of each model).")
@click.option("--timeout", "timeout_s", type=float, default=600.0, show_default=True, help="Seconds per request.")
@click.option("--seed", type=int, default=0, show_default=True, help="For prompts and random transforms.")
@click.option("--watch/--no-watch", default=True, help="Record queues, memory and placement of a Prism server.")
@click.option(
    "--calibrate", "only_calibrate", is_flag=True, help="Run each model alone and write its P95s as objectives."
)
@transform_options
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, trace: Path, out: Path | None, resume: bool, repeat: Path | None, only_calibrate: bool,
    as_json: bool, **values: Any,
) -> None:  # fmt: skip
    """Send TRACE's requests at their times (open loop) to an OpenAI-compatible server, streaming, and measure.

    Writes records.jsonl, report.json and report.html into --out. Ctrl-C ends it early; --resume goes on. --repeat sends
    the requests of an earlier report again.
    """
    folder = _folder(out, resume, only_calibrate)
    options, watch, title, admin_key = _options(trace, values)
    given = {name for name in ctx.params if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if only_calibrate:
        _calibrate(make_plan(options), folder, options, as_json)
        return
    if repeat is not None:
        plan = _repeated(repeat, trace, options, given)
    else:
        plan = _resumed(folder, trace, options, given) if resume else make_plan(options)
    watcher = _watcher(plan.url, admin_key or options.api_key) if watch else None
    has_slo = any(o != Objective() for o in plan.objectives.values())
    with LiveProgress(count_requests(plan), has_slo) as progress:
        outcome = run_replay(
            plan, folder, title=title, api_key=options.api_key, watcher=watcher, on_progress=progress,
            facts={"command": _command_line(trace, values), **_policy(values["catalog"])},
        )  # fmt: skip
    _print(outcome, as_json)
    if outcome.interrupted:
        raise CliError(f"interrupted; go on with --resume --out {folder}", Exit.FAILED)


def _folder(out: Path | None, resume: bool, calibration: bool) -> Path:
    """Where the results go; a calibration has a folder for each model in it."""
    folder = out or Path(time.strftime("replay-%Y%m%d-%H%M%S"))
    records = [
        path for path in folder.glob("*/records.jsonl" if calibration else "records.jsonl") if path.stat().st_size
    ]
    if resume and not records:
        raise InvalidValue("resume", str(folder), "has no records.jsonl to go on with (give the folder with --out)")
    if not resume and records:
        raise InvalidValue("out", str(folder), "already holds a replay; use another folder or --resume")
    return folder


def _resumed(folder: Path, trace: Path, options: ReplayOptions, given: set[str]) -> SendPlan:
    """The plan of the replay in ``folder``. What is ``given`` again must say the same."""
    plan = _anew(with_trace(kept_plan(folder), trace), options, given)
    if given - _ANY_TIME and (other := differences(plan, make_plan(replace(options, probe=False)))):
        raise InvalidValue("resume", str(folder), f"is a replay with other settings ({', '.join(other)})")
    return plan


def _repeated(report: Path, trace: Path, options: ReplayOptions, given: set[str]) -> SendPlan:
    if given - _ANY_TIME:
        raise InvalidValue(
            "repeat", str(report), f"says this already, leave it out: {', '.join(sorted(given - _ANY_TIME))}"
        )
    return _anew(with_trace(reported_plan(report), trace), options, given)


def _anew(plan: SendPlan, options: ReplayOptions, given: set[str]) -> SendPlan:
    """``plan`` with what does not change what is sent."""
    url = options.url if "url" in given else plan.url
    return msgspec.structs.replace(
        plan, url=url, timeout_s=options.timeout_s if "timeout_s" in given else plan.timeout_s
    )


def _options(trace: Path, values: dict[str, Any]) -> tuple[ReplayOptions, bool, str, str | None]:
    """The options of the replay; then whether to watch, the title, the admin key."""
    given = dict(values)
    steps = steps_of(given, given["seed"])
    objectives, tokenizers = _catalog(given.pop("catalog"))
    if (slo := given.pop("slo")) is not None:
        objectives.update(read_objectives(slo))
    for item in given.pop("tokenizers"):
        model, equals, path = item.partition("=")
        if not equals:
            raise InvalidValue("tokenizer", item, "must be MODEL=PATH")
        tokenizers[model] = Path(path)
    extra = _extra(given.pop("extra"))
    onto = [name.strip() for name in (given.pop("onto") or "").split(",") if name.strip()]
    default = Objective(given.pop("slo_ttft"), given.pop("slo_tpot"))
    watch, title, admin_key = given.pop("watch"), given.pop("title"), given.pop("admin_key")
    options = ReplayOptions(
        trace=trace, steps=steps, objectives=objectives, tokenizers=tokenizers, extra=extra, onto=onto,
        fold=given.pop("how"), default_objective=default, **given,
    )  # fmt: skip
    return options, watch, title or f"Replay of {trace.name}", admin_key


def _extra(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as exc:
        raise InvalidValue("extra", text, f"is not JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise InvalidValue("extra", text, "must be a JSON object")
    return found


def _catalog(path: Path | None) -> tuple[dict[str, Objective], dict[str, Path]]:
    if path is None:
        return {}, {}
    catalog = load_catalog(path)
    objectives, tokenizers = {}, {}
    for entry in catalog.entries:
        objectives[entry.name] = Objective(entry.slo.ttft_s, entry.slo.tpot_s)
    for model in catalog.models:
        folder = catalog.base / model.path
        if (folder / "tokenizer.json").is_file():
            tokenizers[model.name] = folder
    return objectives, tokenizers


def _policy(catalog: Path | None) -> dict[str, Any]:
    """What the catalog says of scheduling, for the report."""
    return {} if catalog is None else {"policy": msgspec.to_builtins(load_catalog(catalog).policy.settings())}


def _watcher(url: str, key: str | None) -> Watcher | None:
    watcher = Watcher(url, key)
    if watcher.available():
        return watcher
    click.echo(f"not watching the server: {watcher.problem}", err=True)
    return None


def _calibrate(plan: SendPlan, folder: Path, options: ReplayOptions, as_json: bool) -> None:
    def say(model: str, objective: Objective) -> None:
        click.echo(f"{model}: P95 TTFT {seconds(objective.ttft_s)}, P95 TPOT {seconds(objective.tpot_s)}", err=True)

    folder.mkdir(parents=True, exist_ok=True)
    found = calibrate(plan, folder, limit=options.limit, api_key=options.api_key, on_model=say)
    if as_json:
        print_json({"models": {name: msgspec.to_builtins(objective) for name, objective in found.items()}})
    click.echo(f"objectives: {folder / 'slo.json'}", err=True)


def _command_line(trace: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options as given, without secrets."""
    kept = {k: v for k, v in values.items() if k not in ("api_key", "admin_key") and v is not None and v != ()}
    return {"trace": str(trace), **{k: str(v) if isinstance(v, Path) else v for k, v in kept.items()}}


def _print(outcome: Outcome, as_json: bool) -> None:
    report = outcome.report
    if as_json:
        print_json(msgspec.to_builtins(report))
        return
    columns = (
        "model",
        "requests>",
        "failed>",
        "TTFT met>",
        "TPOT met>",
        "both>?3",
        "TTFT P50>?4",
        "P95>?2",
        "TPOT P50>?5",
        "P95>?1",
    )
    print_table(columns, [_line(group) for group in (*report.models, report.all)], "no requests")
    for note in report.notes:
        click.echo(f"note: {note}")
    click.echo(f"page: {outcome.folder / 'report.html'}")


def _line(group: Group) -> tuple[str, ...]:
    met = group.attainment
    percentiles = [
        seconds(values.at(p)) if values is not None else "-"
        for values in (group.ttft_s, group.tpot_s)
        for p in (50.0, 95.0)
    ]
    failed = f"{sum(group.errors.values()):,}"
    return (group.name, f"{met.requests:,}", failed, share(met.ttft), share(met.tpot), share(met.both), *percentiles)
