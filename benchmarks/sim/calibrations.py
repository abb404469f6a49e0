"""What calibration runs of one machine say together.

A machine that others share with us is a third faster in one minute than in the next, and a run of four minutes is told
of its own minutes only. Several, made between the runs that they are to foretell, are told of all: their samples are
fitted together, and of what is one number in each the mean is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import msgspec

from prism.sim.calibrate import (
    TOGETHER_OUTPUT,
    CalibrationPlan,
    activation_s,
    building_s,
    calibrate,
    fit_crowding,
    fit_sharing,
    slowdowns,
)
from prism.sim.calibration import CalibrationFile
from prism.trace.report import RequestRecord


@dataclass(frozen=True)
class HostCalibration:
    """Of a host whose cores play devices."""

    table: CalibrationFile
    slower: dict[int, float]
    """:func:`prism.sim.calibrate.slowdowns`."""
    share: float
    background: float
    crowding: float
    build_s: float
    wake_s: float


def calibrated(
    runs: Sequence[Sequence[RequestRecord]],
    plan: CalibrationPlan,
    cores: int,
    declared_s: Mapping[str, float] | None = None,
) -> HostCalibration:
    """What ``runs`` of ``plan``, one or more, say. ``declared_s``: what one token of each model takes on paced devices,
    which engines have in turns for that time; else they share the cores."""
    each = [slowdowns(records, plan) for records in runs]
    slower = {
        count: fmean(one[count] for one in each if count in one) for count in sorted({n for one in each for n in one})
    }
    share, background = fit_sharing(slower, cores) if declared_s is None else (_turn(runs, plan, declared_s), 0.0)
    crowding = fit_crowding(slower, cores, share, background) if declared_s is None else 0.0
    # Engines of a paced device have it in turns, whatever their batch; the system beside them takes nothing of it.
    overrides = {"engine_share": share, "thread_share": 1.0 / cores if declared_s is None else 0.0}
    tables = [
        calibrate((r for r in records if r.row in plan.alone), "cpu", f"{cores} cores, virtual devices", overrides)
        for records in runs
    ]
    table = msgspec.structs.replace(tables[0], samples=[sample for one in tables for sample in one.samples])
    wake_s = fmean(activation_s(records, plan) for records in runs)
    build_s = max(wake_s, fmean(building_s(records, plan) for records in runs))
    return HostCalibration(table, slower, share, background, crowding, build_s, wake_s)


def _turn(runs: Sequence[Sequence[RequestRecord]], plan: CalibrationPlan, declared_s: Mapping[str, float]) -> float:
    """The part of a token's time for which an engine that is alone has its device; of the longer lone answers."""
    parts = [
        declared_s[record.model] / record.tpot_s
        for records in runs
        for record in records
        if record.row in plan.alone and record.output_tokens == TOGETHER_OUTPUT and not record.error and record.tpot_s
    ]
    return min(1.0, median(parts))
