"""What a folder of runs holds: its set-up and the grid that its runs span, for summarizing without running."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.slo.spec import ABLATIONS, POLICIES, VARIANTS, Grid, Setup
from prism.core.settings import PolicyName

_KNOWN = tuple(dict.fromkeys((*POLICIES, *(name.value for name in PolicyName))))
_RUN = re.compile(
    rf"(?P<trace>.+)-(?P<label>(?:{'|'.join(_KNOWN)})[^-]*)"
    r"-r(?P<rate>[\d.e+]+)-s(?P<scale>[\d.e+]+)-d(?P<devices>\d+)-(?P<repeat>\d+)"
)


def setup_of(out: Path, default: Setup) -> Setup:
    """The set-up that the calibration in ``out`` was made with; ``default`` for what it does not say."""
    path = out / "slo.json"
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes()).get("setup", {}) if path.exists() else {}
    names = {field.name for field in fields(Setup)} - {"models_folder", "recorded"}
    given = {name: getattr(default, name) for name in ("models_folder", "recorded")}
    return Setup(**given, **{name: found.get(name, getattr(default, name)) for name in names})


def grid_of(out: Path, setup: Setup) -> Grid:
    """The grid over all runs in ``out`` that have a report; points between them may be missing."""
    folders = sorted(path.parent.name for path in (out / "runs").glob("*/report.json"))
    runs = [found.groupdict() for folder in folders if (found := _RUN.fullmatch(folder))]
    labels = {run["label"] for run in runs}
    base = {"rate": setup.base_rate, "scale": setup.base_scale, "devices": float(setup.base_devices)}

    def axis(name: str) -> tuple[float, ...]:
        """Values of one axis among the runs that are at the base of the others."""
        others = [other for other in base if other != name]
        return tuple(sorted({float(r[name]) for r in runs if all(float(r[o]) == base[o] for o in others)}))

    def named(variants: Iterable[str]) -> dict[str, str]:
        return {f"prism {variant}".replace(" ", "_"): f"prism {variant}" for variant in variants}

    away = {r["label"] for r in runs if any(float(r[name]) != value for name, value in base.items())}
    swept = [label for name, label in named(VARIANTS).items() if name in away or name in labels - set(named(ABLATIONS))]
    return Grid(
        traces=tuple(sorted({run["trace"] for run in runs})),
        policies=(*(policy for policy in _KNOWN if policy in labels), *swept),
        rates=axis("rate"),
        scales=axis("scale"),
        devices=tuple(int(value) for value in axis("devices")),
        repeats=1 + max((int(run["repeat"]) for run in runs), default=-1),
        ablations=bool(set(named(ABLATIONS)) & labels - away),
    )
