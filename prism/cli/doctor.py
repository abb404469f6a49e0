"""``prism doctor``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from prism.cli import output
from prism.cli.errors import Exit

if TYPE_CHECKING:
    from prism.cli.diagnosis import Finding

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "missing": "[red]missing[/]", "info": "[dim]info[/]"}


@click.command()
@click.option("--catalog", type=click.Path(path_type=Path), help="Also check what this catalog needs.")
@click.option(
    "--prepare",
    is_flag=True,
    help="Compile ahead what engines compile at their first use: a server of its own answers once with every model of "
    "the catalog. Best while nothing else uses the GPUs.",
)
@output.json_option
@click.pass_context
def command(context: click.Context, catalog: Path | None, prepare: bool, as_json: bool) -> None:
    """Say what is missing on this machine for serving, and how to get it; exit code 1 if something needed is."""
    from prism.cli.diagnosis import examine

    if prepare and catalog is None:
        raise click.UsageError("--prepare needs --catalog: kernels differ by model")
    with output.progress("looking at this machine"):
        findings = examine(catalog)
    if prepare and catalog is not None:
        findings += prepared(catalog)
    failed = any(finding.status == "missing" for finding in findings)
    if as_json:
        output.print_json({"ok": not failed, "findings": [finding.as_dict() for finding in findings]})
    else:
        rows = [(MARKS[finding.status], finding.what, finding.found, finding.remedy) for finding in findings]
        output.print_table(("", "WHAT", "FOUND~", "WHAT TO DO~"), rows, "")
    context.exit(Exit.FAILED if failed else Exit.OK)


def prepared(catalog: Path) -> list[Finding]:
    """What came of compiling ahead, told as it goes."""
    from prism.cli.diagnosis import Finding
    from prism.cli.preparing import CannotPrepare, prepare
    from prism.config.catalog import load_catalog

    found: list[Finding] = []
    try:
        for finding in prepare(load_catalog(catalog)):
            click.echo(f"{finding.what}: {finding.found}", err=True)
            found.append(finding)
    except CannotPrepare as error:
        found.append(Finding("kernels", "missing", "not prepared", str(error)))
    return found
