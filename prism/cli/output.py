"""How verbs print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.table import Table

from prism.cli.table import fitted

F = TypeVar("F", bound=Callable[..., Any])

PIPE_WIDTH = 240
"""Columns of a table that goes into a file or a pipe, where nothing should be cut."""


def json_option(command: F) -> F:
    """``--json``: print the data instead of a table (argument ``as_json``)."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def console(error: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for everything when there is none."""
    stream = sys.stderr if error else sys.stdout
    return Console(stderr=error, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """A plain table that fits the screen; ``columns`` as in :class:`prism.cli.table.Column`."""
    return fitted(columns, rows, console().width, title)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    """Print a table, or the sentence ``empty`` when there are no rows."""
    listed = list(rows)
    if listed:
        show(table(columns, listed))
    else:
        click.echo(empty)


def show(*parts: RenderableType) -> None:
    """Print tables and lines; without the padding of a terminal when there is none."""
    screen = console()
    if screen.is_terminal:
        screen.print(*parts, sep="\n")
        return
    with screen.capture() as captured:
        screen.print(*parts, sep="\n")
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def progress(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show on the terminal's error stream that something is going on, and for how long. What is yielded may be called
    with (done, all), in bytes, to show how far it is too."""
    screen = console(error=True)
    if not screen.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(text, total=None)

        def report(done: int, total: int) -> None:
            bar.columns = (*columns, BarColumn(), DownloadColumn(binary_units=True))
            bar.update(task, completed=done, total=total)

        yield report


def size(value: object) -> str:
    """``1.5 GiB``; a dash for what is unknown."""
    if not isinstance(value, int | float):
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def share(value: object) -> str:
    """``97.5%``; a dash for what is unknown."""
    return f"{100 * value:.1f}%" if isinstance(value, int | float) else "-"


def seconds(value: object) -> str:
    """``350ms``, ``2.5s``, ``3m20s``, ``2h05m``, ``9d``; a dash for what is unknown."""
    if not isinstance(value, int | float):
        return "-"
    if value < 0.9995:
        return f"{1000 * value:.0f}ms"
    if value < 60:
        return f"{value:.1f}s"
    if value < 3600:
        return f"{int(value // 60)}m{int(value % 60):02d}s"
    if value < 2 * 86400:
        return f"{int(value // 3600)}h{int(value % 3600 // 60):02d}m"
    return f"{int(value // 86400)}d"


def ago(at_s: object, now_s: float | None = None) -> str:
    """How long ago a Unix time was; ``never`` for None."""
    if not isinstance(at_s, int | float):
        return "never"
    return f"{seconds(max((time.time() if now_s is None else now_s) - at_s, 0.0))} ago"


def reason(value: object) -> str:
    """A reason's code and the numbers behind it on one line."""
    if not isinstance(value, dict):
        return str(value or "")
    numbers = ", ".join(f"{key}={_short(number)}" for key, number in value.items() if key != "code")
    return f"{value.get('code', '')} ({numbers})" if numbers else str(value.get("code", ""))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
