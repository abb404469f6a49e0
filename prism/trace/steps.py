"""Transforms as data: a list of steps that a command line, a report or another process can hold and apply again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from prism.core.errors import InvalidValue
from prism.trace import transform
from prism.trace.lengths import length_table
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo

Step = dict[str, Any]


def apply_steps(rows: Iterable[TraceRow], steps: Sequence[Step]) -> Iterator[TraceRow]:
    """``rows`` after all ``steps`` (each ``{"step": NAME, ...settings}``), streamed."""
    stream = iter(rows)
    for step in steps:
        settings = dict(step)
        name = settings.pop("step", None)
        if name not in STEPS:
            raise InvalidValue("step", name, "unknown transform", list(STEPS))
        try:
            stream = STEPS[name](stream, **settings)
        except TypeError as exc:
            raise InvalidValue(f"step {name}", settings, str(exc)) from exc
    return stream


def info_after(info: TraceInfo, steps: Sequence[Step]) -> TraceInfo:
    """What is known of the trace after ``steps``."""
    for step in steps:
        settings = {key: value for key, value in step.items() if key != "step"}
        info = info.with_step(step["step"], **settings)
        if step["step"] == "lengths":
            info = TraceInfo(info.provenance, transform.scaled_block_tokens(info.block_tokens, step.get("prompt", 1.0)))
    return info


def count_models(rows: Iterable[TraceRow]) -> dict[str, int]:
    """Requests by model."""
    return dict(Counter(row.model for row in rows))


def _window(rows: Iterator[TraceRow], start_s: float = 0.0, end_s: float | None = None) -> Iterator[TraceRow]:
    return transform.window(rows, start_s, math.inf if end_s is None else end_s)


def _fill(rows: Iterator[TraceRow], table: str, seed: int = 0) -> Iterator[TraceRow]:
    return transform.fill_lengths(rows, length_table(table), seed)


def _rename(rows: Iterator[TraceRow], names: dict[str, str]) -> Iterator[TraceRow]:
    """Models that are not named keep their names."""
    return (replace(row, model=names.get(row.model, row.model)) for row in rows)


def _split(rows: Iterator[TraceRow], models: list[str], zipf: float = 0.92, seed: int = 0) -> Iterator[TraceRow]:
    return transform.split(rows, models, zipf, seed)


STEPS: Final[dict[str, Callable[..., Iterator[TraceRow]]]] = {
    "window": _window,
    "time": lambda rows, factor: transform.scale_time(rows, factor),
    "rate": lambda rows, factor, seed=0: transform.change_rate(rows, factor, seed),
    "lengths": lambda rows, **settings: transform.scale_lengths(rows, **settings),
    "models": lambda rows, names: transform.rename_models(rows, names),
    "only": lambda rows, models: (row for row in rows if row.model in models),
    "rename": _rename,
    "split": _split,
    "fill": _fill,
}
