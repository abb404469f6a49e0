"""The line that shows how a replay is going."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table


class LiveProgress:
    """A small live table on the terminal's error stream, or a line every ten seconds where there is no terminal.
    ``total`` requests are to be sent, if that is known; those that an earlier part sent count."""

    def __init__(self, total: int | None, has_objectives: bool) -> None:
        self._console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
        self._total, self._has_objectives = total, has_objectives
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._said_s = 0.0

    def __enter__(self) -> LiveProgress:
        if self._console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.__exit__(kind, error, trace)

    def __call__(self, state: dict[str, Any]) -> None:
        """Show the sender's progress message."""
        if self._console.is_terminal:
            self._live.update(self._table(state))
        elif state["at_s"] - self._said_s >= 10:
            self._said_s = state["at_s"]
            self._console.print("  ".join(f"{name} {value}" for name, value in self._cells(state)), highlight=False)

    def _table(self, state: dict[str, Any]) -> Table:
        cells = self._cells(state)
        table = Table(*(name for name, _ in cells), box=None, pad_edge=False, header_style="bold")
        table.add_row(*(value for _, value in cells))
        return table

    def _cells(self, state: dict[str, Any]) -> list[tuple[str, str]]:
        ended, before = state["ended"], state.get("skipped", 0)
        total = f"/{self._total}" if self._total else ""
        cells = [
            ("time", f"{max(0.0, state['at_s']):.0f}s"),
            ("sent", f"{before + state['sent']}{total}"),
            ("done", str(before + ended)),
            ("open", str(state["in_flight"])),
            ("failed", str(sum(state["errors"].values()))),
            ("TTFT p50", _ms(state["ttft_p50_s"])),
            ("p95", _ms(state["ttft_p95_s"])),
        ]
        if self._has_objectives and ended:
            cells.append(("TTFT met", f"{100 * state['met_ttft'] / ended:.1f}%"))
            cells.append(("TPOT met", f"{100 * state['met_tpot'] / ended:.1f}%"))
        return [*cells, ("lag p99", _ms(state["lag_p99_s"]))]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.0f}ms" if value < 10 else f"{value:.1f}s"
