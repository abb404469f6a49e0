"""Transforms on the command line: the same options for ``prism trace transform`` and ``prism replay``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from prism.core.errors import InvalidValue
from prism.trace.lengths import TABLES
from prism.trace.steps import Step

F = TypeVar("F", bound=Callable[..., Any])


def transform_options(command: F) -> F:
    """Adds the options; :func:`steps_of` turns their values into steps."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def steps_of(values: dict[str, Any], seed: int) -> list[Step]:
    """The steps, in a fixed order: window, lengths filled and scaled, models, rate, time. Takes the values of
    :func:`transform_options` out of ``values``."""
    taken = {name: values.pop(name) for name in _NAMES}
    steps: list[Step] = []
    if taken["window"]:
        steps.append({"step": "window", "start_s": taken["window"][0], "end_s": taken["window"][1]})
    if taken["fill_lengths"]:
        steps.append({"step": "fill", "table": taken["fill_lengths"], "seed": seed})
    lengths = {
        "prompt": taken["prompt_scale"],
        "output": taken["output_scale"],
        "most_prompt": taken["most_prompt"],
        "most_output": taken["most_output"],
        "most_total": taken["most_total"],
    }
    if lengths != {"prompt": 1.0, "output": 1.0, "most_prompt": None, "most_output": None, "most_total": None}:
        steps.append({"step": "lengths", **lengths})
    if taken["only"]:
        steps.append({"step": "only", "models": _names(taken["only"])})
    if taken["rename"]:
        steps.append({"step": "rename", "names": dict(_renaming(item) for item in taken["rename"])})
    if taken["split"]:
        steps.append({"step": "split", "models": _names(taken["split"]), "zipf": taken["zipf"], "seed": seed})
    if taken["rate"] != 1.0:
        steps.append({"step": "rate", "factor": taken["rate"], "seed": seed})
    if taken["time"] != 1.0:
        steps.append({"step": "time", "factor": taken["time"]})
    return steps


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _renaming(item: str) -> tuple[str, str]:
    old, equals, new = item.partition("=")
    if not (equals and new):
        raise InvalidValue("rename", item, "must be OLD=NEW")
    return old, new


class _Window(click.ParamType[tuple[float, float | None]]):
    name = "START:END"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        start, colon, end = str(value).partition(":")
        try:
            if not colon:
                raise ValueError
            return float(start or 0), float(end) if end else None
        except ValueError:
            self.fail(f"{value!r} is not START:END in seconds (either may be empty)", param, ctx)


_OPTIONS = (
    click.option("--window", type=_Window(), help="Only these seconds of the trace."),
    click.option("--rate", type=float, default=1.0, show_default=True, help="Times as many requests, same pattern."),
    click.option("--time", type=float, default=1.0, show_default=True, help="Stretch all times by this factor."),
    click.option("--prompt-scale", type=float, default=1.0, help="Multiply prompt lengths."),
    click.option("--output-scale", type=float, default=1.0, help="Multiply output lengths."),
    click.option("--most-prompt", type=int, help="Cut prompts to so many tokens."),
    click.option("--most-output", type=int, help="Cut outputs to so many tokens."),
    click.option("--most-total", type=int, help="Cut prompts so that prompt + output fit a context of so many tokens."),
    click.option("--fill-lengths", type=click.Choice(list(TABLES)), help="Draw unknown lengths from this table."),
    click.option("--only", help="Only the requests of these models of the trace (comma-separated)."),
    click.option("--rename", multiple=True, metavar="OLD=NEW", help="Give a model of the trace another name (repeat)."),
    click.option("--split", help="Deal the requests at random to these models (comma-separated)."),
    click.option("--zipf", type=float, default=0.92, show_default=True, help="Popularity exponent for --split."),
)
_NAMES = (
    "window", "rate", "time", "prompt_scale", "output_scale", "most_prompt", "most_output", "most_total",
    "fill_lengths", "only", "rename", "split", "zipf",
)  # fmt: skip
