"""Small traces for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trace.originals import VARIABLE, find_original
from prism.trace.files import write_trace
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo


def original(name: str) -> Path:
    """The recorded trace called ``name``; the test is skipped where nobody has it."""
    found = find_original(f"{name}.parquet")
    if found is None:
        pytest.skip(f"the recorded trace {name} is in no folder of {VARIABLE}")
    return found


def row(at_s: float, model: str = "a", prompt: int | None = 10, output: int | None = 5, **more: object) -> TraceRow:
    return TraceRow(at_s, model, prompt, output, **more)  # type: ignore[arg-type]


def steady(count: int, gap_s: float = 0.1, models: int = 2) -> list[TraceRow]:
    return [row(i * gap_s, f"m{i % models}", 5 + i % 7, 3 + i % 5) for i in range(count)]


def saved(path: Path, rows: list[TraceRow], info: TraceInfo | None = None) -> Path:
    write_trace(path, rows, info or TraceInfo())
    return path
