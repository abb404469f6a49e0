"""``prism doctor``"""

from __future__ import annotations

from pathlib import Path

import click

from prism.cli import output
from prism.cli.errors import Exit

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "missing": "[red]missing[/]", "info": "[dim]info[/]"}


@click.command()
@click.option("--catalog", type=click.Path(path_type=Path), help="Also check what this catalog needs.")
@output.json_option
@click.pass_context
def command(context: click.Context, catalog: Path | None, as_json: bool) -> None:
    """Say what is missing on this machine for serving, and how to get it; exit code 1 if something needed is."""
    from prism.cli.diagnosis import examine

    with output.progress("looking at this machine"):
        findings = examine(catalog)
    failed = any(finding.status == "missing" for finding in findings)
    if as_json:
        output.print_json({"ok": not failed, "findings": [finding.as_dict() for finding in findings]})
    else:
        rows = [(MARKS[finding.status], finding.what, finding.found, finding.remedy) for finding in findings]
        output.print_table(("", "WHAT", "FOUND~", "WHAT TO DO~"), rows, "")
    context.exit(Exit.FAILED if failed else Exit.OK)
