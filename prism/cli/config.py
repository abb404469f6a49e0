"""``prism config``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from prism.cli import output
from prism.cli.errors import CliError, Exit
from prism.config.catalog import Catalog, examine_catalog, load_catalog
from prism.config.devices import resolve_devices
from prism.config.health import examine_model, too_large
from prism.core.errors import InvalidValue
from prism.core.ids import NodeId


@click.group()
def command() -> None:
    """Check catalogs, compare two, print their JSON schema."""


@command.command()
@click.argument("catalog", type=click.Path(path_type=Path))
@click.option("--files", is_flag=True, help="Also look at every model's files and templates, and whether it fits.")
@output.json_option
@click.pass_context
def check(context: click.Context, catalog: Path, files: bool, as_json: bool) -> None:
    """Check CATALOG. Every problem is shown with file, line, key, value and choices; exit code 1 if there is one."""
    loaded, problems = examine_catalog(catalog)
    sizes = _sizes(loaded) if files and loaded is not None else []
    failed = bool(problems) or any(row["error"] for row in sizes)
    if as_json:
        count = 0 if loaded is None else len(loaded.models)
        shown = [_problem(problem) for problem in problems]
        output.print_json({"ok": not failed, "models": count, "problems": shown, "files": sizes})
    else:
        if files and loaded is not None:
            _show_sizes(sizes)
        if problems:
            raise CliError("the catalog cannot be used\n" + "\n".join(map(str, problems)))
        if loaded is not None:
            what = "some models cannot be served" if failed else "the catalog is valid"
            click.echo(f"{catalog}: {len(loaded.models)} models, {len(loaded.keys)} keys: {what}")
    context.exit(Exit.FAILED if failed else Exit.OK)


@command.command()
def schema() -> None:
    """Print the JSON schema of a catalog, for editors: `# yaml-language-server: $schema=FILE` in the first line."""
    from prism.config.schema import shipped_schema

    click.echo(json.dumps(shipped_schema(), indent=2, ensure_ascii=False))


@command.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@output.json_option
def diff(old: Path, new: Path, as_json: bool) -> None:
    """Show what a server that runs OLD would change on a reload with NEW, and what needs a restart."""
    from prism.config import reload

    found = reload.diff(load_catalog(old), load_catalog(new))
    if as_json:
        output.print_json(
            {
                "added": [model.name for model in found.added],
                "removed": [model.name for model in found.removed],
                "changed": {change.new.name: list(change.keys) for change in found.changed},
                "reactivate": [change.new.name for change in found.changed if change.reactivate],
                "settings": list(found.server),
                "keys_changed": found.keys_changed,
                "needs_restart": list(found.needs_restart),
            }
        )
    else:
        click.echo(found.summary())


def _problem(problem: InvalidValue) -> dict[str, Any]:
    fields = ("where", "key", "value", "why", "choices")
    return {field: getattr(problem, field) for field in fields}


def _sizes(catalog: Catalog) -> list[dict[str, Any]]:
    """What each model's files say, and why it could not be served (several reasons: one per line)."""
    largest_bytes = _largest_device_bytes(catalog)
    rows = []
    for model in catalog.models:
        found = examine_model(catalog, model.name)
        problems, spec = list(found.problems), found.spec
        if spec is not None and largest_bytes is not None and (why := too_large(spec, largest_bytes)) is not None:
            problems.append(f"{why} (a machine that joins the fleet may have a larger one)")
        row: dict[str, Any] = {"model": model.name, "error": "\n".join(problems)}
        if spec is not None:
            row["weight_bytes"], row["context_tokens"] = spec.weight_bytes, spec.context_tokens
            row["kv_bytes_per_token"] = spec.shape.kv_bytes_per_token
        rows.append(row)
    return rows


def _largest_device_bytes(catalog: Catalog) -> int | None:
    """None when it depends on GPUs that are not in this machine."""
    from prism.memory.gpus import gpus_if_any

    try:
        gpus = gpus_if_any()
        return max(d.memory_bytes for d in resolve_devices(catalog, NodeId("local"), gpus.memory_bytes, gpus.refused))
    except InvalidValue:
        return None


def _show_sizes(sizes: list[dict[str, Any]]) -> None:
    rows = [
        (
            row["model"],
            output.size(row.get("weight_bytes")),
            output.size(row.get("kv_bytes_per_token")),
            str(row.get("context_tokens", "-")),
            row["error"],
        )
        for row in sizes
    ]
    output.print_table(("MODEL", "WEIGHTS>", "KV PER TOKEN>?2", "CONTEXT>?1", "~"), rows, "no models")
