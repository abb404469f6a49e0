"""Objectives as the Prism paper sets them: each model's workload alone, then the P95 of its TTFT and TPOT.

One model after the other gets its own requests with their own gaps; nothing else is sent meanwhile. Whether the model
has a device to itself is the server's side: give it one device per model, or one catalog per model as
``benchmarks/slo`` does. The first request warms the model up and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from prism.core.errors import PrismError
from prism.trace.replay.plan import Objective, SendPlan
from prism.trace.replay.planning import first_arrivals, only_model
from prism.trace.replay.probe import Prober
from prism.trace.replay.run import run_replay
from prism.trace.report import Report

PERCENTILE = 95.0


class CalibrationFailed(PrismError):
    """A model's workload alone gave no latencies to take objectives from."""


def calibrate(
    plan: SendPlan,
    folder: Path,
    *,
    limit: int | None,
    api_key: str | None,
    on_model: Callable[[str, Objective], None] = lambda *_: None,
) -> dict[str, Objective]:
    """Each model's objective at scale 1; also written to ``folder/slo.json``, with each model's report beside it.
    ``limit`` takes only the first requests of each model. Raises :class:`CalibrationFailed` when requests failed."""
    found: dict[str, Objective] = {}
    first_s = first_arrivals(plan)
    for model in plan.models:
        prober = Prober(plan.url, plan.endpoint, api_key, plan.ignore_eos, plan.timeout_s)
        prober.calibrate(plan.models[model], plan.prompts[model])
        alone = only_model(plan, model, limit, first_s[model])
        outcome = run_replay(alone, folder / safe_name(model), title=f"{model} alone (calibration)", api_key=api_key)
        found[model] = objective_of(outcome.report, model)
        on_model(model, found[model])
    write_objectives(folder / "slo.json", found, {"trace": plan.trace, "trace_sha256": plan.trace_sha256})
    return found


def objective_of(report: Report, model: str) -> Objective:
    """P95 TTFT and TPOT of ``report``, which must have no failed request."""
    group = report.model(model)
    if group.errors or group.ttft_s is None:
        raise CalibrationFailed(f"model {model!r}: requests failed alone on the server: {group.errors or 'no answer'}")
    tpot_s = group.tpot_s.at(PERCENTILE) if group.tpot_s is not None else None
    return Objective(group.ttft_s.at(PERCENTILE), tpot_s)


def write_objectives(path: Path, objectives: dict[str, Objective], facts: dict[str, Any]) -> None:
    """The file that ``--slo`` and :func:`~prism.trace.replay.plan.read_objectives` read."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode({"models": objectives, **facts}), indent=1) + b"\n")


def safe_name(model: str) -> str:
    """The model's name as a file name."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in model)
