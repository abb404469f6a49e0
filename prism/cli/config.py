"""``prism config``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from prism.cli import output
from prism.cli.errors import CliError, Exit
from prism.config.catalog import Catalog, load_catalog
from prism.config.errors import CatalogError, ModelFilesError
from prism.core.errors import InvalidValue


@click.group()
def command() -> None:
    """Check catalogs, compare two, print their JSON schema."""


@command.command()
@click.argument("catalog", type=click.Path(path_type=Path))
@click.option("--files", is_flag=True, help="Also read the headers of every model's files and show its sizes.")
@output.json_option
@click.pass_context
def check(context: click.Context, catalog: Path, files: bool, as_json: bool) -> None:
    """Check CATALOG. Every problem is shown with file, line, key, value and choices; exit code 1 if there is one."""
    try:
        loaded = load_catalog(catalog)
    except CatalogError as error:
        _show_problems(error, as_json)
        context.exit(Exit.FAILED)
    sizes = [_sizes(loaded, model.name) for model in loaded.models] if files else []
    failed = any(row["error"] for row in sizes)
    if as_json:
        output.print_json({"ok": not failed, "models": len(loaded.models), "problems": [], "files": sizes})
    else:
        click.echo(f"{catalog}: {len(loaded.models)} models, {len(loaded.keys)} keys: the catalog is valid")
        if files:
            _show_sizes(sizes)
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


def _show_problems(error: CatalogError, as_json: bool) -> None:
    if not as_json:
        raise CliError(f"the catalog cannot be used\n{error}")
    output.print_json({"ok": False, "problems": [_problem(problem) for problem in error.problems]})


def _problem(problem: InvalidValue) -> dict[str, Any]:
    fields = ("where", "key", "value", "why", "choices")
    return {field: getattr(problem, field) for field in fields}


def _sizes(catalog: Catalog, name: str) -> dict[str, Any]:
    """What a model's files say, or why they cannot be used."""
    try:
        spec = catalog.spec(name)
    except ModelFilesError as error:
        return {"model": name, "error": str(error)}
    return {
        "model": name,
        "weight_bytes": spec.weight_bytes,
        "kv_bytes_per_token": spec.shape.kv_bytes_per_token,
        "context_tokens": spec.context_tokens,
        "error": "",
    }


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
