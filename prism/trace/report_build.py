"""From records to a report: attainment, distributions, windows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from prism.trace import gaps
from prism.trace.report import (
    PERCENTILES,
    Attainment,
    Distribution,
    Group,
    Report,
    RequestRecord,
    ScaledAttainment,
    Timeline,
    Window,
)

SCALES: Final = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0)
MOST_WINDOWS: Final = 60
_NICE_WINDOWS_S: Final = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


def build_report(
    records: Iterable[RequestRecord],
    *,
    kind: Literal["replay", "sim"],
    title: str,
    settings: Mapping[str, object],
    timeline: Timeline | None = None,
    notes: Sequence[str] = (),
    sent: bool = True,
    window_s: float | None = None,
) -> Report:
    """The report of a run. ``records`` come in any order and are held in memory; ``sent`` is False when no client sent
    them (so that a send lag means nothing). ``window_s`` defaults to a round length that gives at most 60 windows."""
    rows = sorted(records, key=lambda r: (r.arrival_s, r.row))
    span_s = max((r.arrival_s + r.lag_s + (r.e2e_s or 0.0) for r in rows), default=0.0)
    width_s = window_s or _window_length_s(rows[-1].arrival_s if rows else 0.0)
    by_model: dict[str, list[RequestRecord]] = defaultdict(list)
    for row in rows:
        by_model[row.model].append(row)
    everything = _group("all", rows)
    return Report(
        kind=kind,
        title=title,
        settings=dict(settings),
        span_s=span_s,
        window_s=width_s,
        all=everything,
        models=[_group(name, by_model[name]) for name in sorted(by_model)],
        windows=_windows(rows, width_s),
        by_scale=attainment_by_scale(rows, SCALES) if _has_slo(rows) else [],
        lag_s=distribution([r.lag_s for r in rows]) if sent else None,
        requests_per_s=len(rows) / span_s if span_s else 0.0,
        output_tokens_per_s=everything.output_tokens / span_s if span_s else 0.0,
        timeline=timeline or Timeline(),
        notes=list(notes),
    )


def attainment(records: Sequence[RequestRecord], scale: float = 1.0) -> Attainment:
    """Shares that met their objectives times ``scale``; all 0 when there is no record."""
    ttft = tpot = both = 0
    for record in records:
        in_time, in_pace = record.met_ttft(scale), record.met_tpot(scale)
        ttft += in_time
        tpot += in_pace
        both += in_time and in_pace
    return _shares(len(records), ttft, tpot, both)


def _shares(total: int, ttft: int, tpot: int, both: int) -> Attainment:
    share = 1.0 / total if total else 0.0
    return Attainment(requests=total, ttft=ttft * share, tpot=tpot * share, both=both * share)


def attainment_by_scale(records: Sequence[RequestRecord], scales: Sequence[float]) -> list[ScaledAttainment]:
    """:func:`attainment` for every scale, without looking at every record for each of them."""
    infinite, never = float("inf"), float("nan")
    table = np.array(
        [
            (
                never if r.error or r.ttft_s is None else r.ttft_s,
                infinite if r.slo_ttft_s is None else r.slo_ttft_s,
                never if r.error else r.tpot_s or 0.0,
                infinite if r.slo_tpot_s is None else r.slo_tpot_s,
            )
            for r in records
        ],
        dtype=np.float64,
    ).reshape(-1, 4)
    result = []
    for scale in scales:
        in_time, in_pace = table[:, 0] <= table[:, 1] * scale, table[:, 2] <= table[:, 3] * scale
        counts = int(in_time.sum()), int(in_pace.sum()), int((in_time & in_pace).sum())
        result.append(ScaledAttainment(scale=scale, attainment=_shares(len(records), *counts)))
    return result


def distribution(values: Sequence[float] | NDArray[np.float64]) -> Distribution | None:
    """The distribution of ``values``; None when there are none."""
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0:
        return None
    found = np.percentile(numbers, PERCENTILES)
    return Distribution(count=int(numbers.size), mean=float(numbers.mean()), values=[float(v) for v in found])


def _gap_distribution(records: Sequence[RequestRecord]) -> Distribution | None:
    counts = gaps.merge(r.gaps for r in records)
    if not counts:
        return None
    bins = sorted(counts)
    weights = np.array([counts[b] for b in bins])
    middles = np.array([gaps.bin_middle_s(b) for b in bins])
    ranks = np.cumsum(weights)
    total = int(ranks[-1])
    at = np.searchsorted(ranks, np.asarray(PERCENTILES) / 100 * (total - 1), side="right").clip(max=len(bins) - 1)
    values = [float(v) for v in middles[at]]
    return Distribution(count=total, mean=float((weights * middles).sum() / total), values=values)


def _group(name: str, records: Sequence[RequestRecord]) -> Group:
    return Group(
        name=name,
        attainment=attainment(records),
        errors=dict(sorted(Counter(r.error for r in records if r.error).items())),
        prompt_tokens=sum(r.prompt_tokens for r in records),
        output_tokens=sum(r.output_tokens for r in records),
        slo_ttft_s=_common({r.slo_ttft_s for r in records}),
        slo_tpot_s=_common({r.slo_tpot_s for r in records}),
        ttft_s=distribution([r.ttft_s for r in records if r.ttft_s is not None]),
        tpot_s=distribution([r.tpot_s for r in records if r.tpot_s is not None]),
        e2e_s=distribution([r.e2e_s for r in records if r.e2e_s is not None and not r.error]),
        gap_s=_gap_distribution(records),
    )


def _common(values: set[float | None]) -> float | None:
    return next(iter(values)) if len(values) == 1 else None


def _has_slo(records: Sequence[RequestRecord]) -> bool:
    return any(r.slo_ttft_s is not None or r.slo_tpot_s is not None for r in records)


def _window_length_s(last_arrival_s: float) -> float:
    for width_s in _NICE_WINDOWS_S:
        if last_arrival_s / width_s <= MOST_WINDOWS:
            return width_s
    return last_arrival_s / MOST_WINDOWS


def _windows(records: Sequence[RequestRecord], width_s: float) -> list[Window]:
    if not records:
        return []
    slots: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in records:
        slots[int(record.arrival_s // width_s)].append(record)
    return [_window(index * width_s, slots.get(index, [])) for index in range(max(slots) + 1)]


def _window(start_s: float, records: Sequence[RequestRecord]) -> Window:
    by_model: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        by_model[record.model].append(record)
    return Window(
        start_s=start_s,
        all=attainment(records) if records else None,
        models={name: attainment(rows) for name, rows in sorted(by_model.items())},
    )
