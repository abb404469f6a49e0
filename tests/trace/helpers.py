"""Small traces for tests."""

from __future__ import annotations

from pathlib import Path

from prism.trace.files import write_trace
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo

SHARED = Path(__file__).parents[2] / ".." / "shared" / "traces"


def row(at_s: float, model: str = "a", prompt: int | None = 10, output: int | None = 5, **more: object) -> TraceRow:
    return TraceRow(at_s, model, prompt, output, **more)  # type: ignore[arg-type]


def steady(count: int, gap_s: float = 0.1, models: int = 2) -> list[TraceRow]:
    return [row(i * gap_s, f"m{i % models}", 5 + i % 7, 3 + i % 5) for i in range(count)]


def saved(path: Path, rows: list[TraceRow], info: TraceInfo | None = None) -> Path:
    write_trace(path, rows, info or TraceInfo())
    return path
