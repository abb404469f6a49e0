"""What calibration runs of one machine say together.

A machine that others share with us is a third faster in one minute than in the next, and a run of four minutes is told
of its own minutes only. Several, made between the runs that they are to foretell, are told of all: their samples are
fitted together, and of what is one number in each the mean is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from prism.sim.calibrate import (
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
    """Of a host whose ``cores`` play devices."""

    table: CalibrationFile
    slower: dict[int, float]
    """:func:`prism.sim.calibrate.slowdowns`."""
    share: float
    background: float
    crowding: float
    build_s: float
    wake_s: float


def calibrated(runs: Sequence[Sequence[RequestRecord]], plan: CalibrationPlan, cores: int) -> HostCalibration:
    """What ``runs`` of ``plan``, one or more, say."""
    each = [slowdowns(records, plan) for records in runs]
    slower = {
        count: fmean(one[count] for one in each if count in one) for count in sorted({n for one in each for n in one})
    }
    share, background = fit_sharing(slower, cores)
    overrides = {"engine_share": share, "thread_share": 1.0 / cores}
    tables = [
        calibrate((r for r in records if r.row in plan.alone), "cpu", f"{cores} cores, virtual devices", overrides)
        for records in runs
    ]
    table = msgspec.structs.replace(tables[0], samples=[sample for one in tables for sample in one.samples])
    wake_s = fmean(activation_s(records, plan) for records in runs)
    build_s = max(wake_s, fmean(building_s(records, plan) for records in runs))
    return HostCalibration(
        table, slower, share, background, fit_crowding(slower, cores, share, background), build_s, wake_s
    )
