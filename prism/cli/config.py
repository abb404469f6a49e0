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
from prism.core.ids import NodeId, local_name
from prism.core.specs import DeviceSpec, ModelKind


@click.group()
def command() -> None:
    """Check catalogs, compare two, print their JSON schema."""


@command.command()
@click.argument("catalog", type=click.Path(path_type=Path))
@click.option("--files", is_flag=True, help="Also say what each model will do on this machine's devices, by its files.")
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
            what += "" if files else " (--files says what each model will do here)"
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
    """What each model's and adapter's files say, what it will do on this machine's devices, and why it could not be
    served (several reasons: one per line)."""
    devices = _devices(catalog)
    return [_foretold(catalog, entry.name, devices) for entry in catalog.entries]


def _foretold(catalog: Catalog, name: str, devices: tuple[DeviceSpec, ...]) -> dict[str, Any]:
    from prism.server.kinds import served_at

    found = examine_model(catalog, name, devices={device.kind for device in devices})
    problems, spec = list(found.problems), found.spec
    if spec is not None and devices:
        why = too_large(spec, max(device.memory_bytes for device in devices))
        problems += [f"{why} (a machine that joins the fleet may have a larger one)"] if why is not None else []
    row: dict[str, Any] = {"model": name, "error": "\n".join(problems)}
    if name in catalog.adapters_by_name:
        row["base"] = catalog.served_by(name)
    if spec is not None:
        row["weight_bytes"], row["context_tokens"] = spec.weight_bytes, spec.context_tokens
        row["kv_bytes_per_token"] = spec.shape.kv_bytes_per_token if spec.kind is ModelKind.GENERATE else 0
        row["kind"], row["answers_at"] = spec.kind.value, list(served_at(spec.kind))
        row["fits_on"] = [local_name(d.id) for d in devices if too_large(spec, d.memory_bytes) is None]
    return row


def _devices(catalog: Catalog) -> tuple[DeviceSpec, ...]:
    """Of this machine; none when they are GPUs that are not in it."""
    from prism.memory.gpus import gpus_if_any

    try:
        gpus = gpus_if_any()
        return resolve_devices(catalog, NodeId("local"), gpus.memory_bytes, gpus.refused)
    except InvalidValue:
        return ()


def _show_sizes(sizes: list[dict[str, Any]]) -> None:
    rows = [
        (
            row["model"],
            output.size(row.get("weight_bytes")),
            output.size(row.get("kv_bytes_per_token")),
            str(row.get("context_tokens", "-")),
            row["error"] or _outlook(row),
        )
        for row in sizes
    ]
    output.print_table(("MODEL", "WEIGHTS>", "KV PER TOKEN>?2", "CONTEXT>?1", "~"), rows, "no models")


def _outlook(row: dict[str, Any]) -> str:
    """What will happen to a model without problems."""
    if "base" in row:
        return f"will be served by engines of {row['base']}"
    where = f" on {', '.join(row['fits_on'])}" if row.get("fits_on") else ""
    return f"will be served{where} at {', '.join(row.get('answers_at', ()))}"
