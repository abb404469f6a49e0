"""Latency objectives as the Prism paper sets them (section 7.1): each model's own workload on a GPU of its own, the
95th percentiles of TTFT and TPOT there, times a factor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import Cluster, NodeGroup
from prism.sim.run import SimSpec, simulate
from prism.trace.row import TraceRow

_PERCENTILE = 95.0
_DEFAULT_S = (0.1, 0.02)
"""For a model without requests."""


def dedicated_objectives(
    models: Iterable[ModelSpec], rows: list[TraceRow], cluster: Cluster
) -> dict[str, tuple[float, float]]:
    """P95 of (TTFT, TPOT) in seconds of every model, alone on as many GPUs of ``cluster``'s first kind as it needs."""
    by_model: dict[str, list[TraceRow]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    return {str(m.name): _alone(m, by_model.get(m.name, []), cluster) for m in models}


def _alone(model: ModelSpec, rows: list[TraceRow], cluster: Cluster) -> tuple[float, float]:
    if not rows:
        return _DEFAULT_S
    group: NodeGroup = msgspec.structs.replace(cluster.groups[0], nodes=1, gpus_per_node=model.tp)
    own = msgspec.structs.replace(cluster, groups=(group,), faults=())
    alone = replace(model, pinned=True)
    group_report = simulate(SimSpec(own, (alone,), PolicySettings.named("prism"), lambda: rows)).report.all
    ttft_s = group_report.ttft_s.at(_PERCENTILE) if group_report.ttft_s else _DEFAULT_S[0]
    tpot_s = group_report.tpot_s.at(_PERCENTILE) if group_report.tpot_s else _DEFAULT_S[1]
    return ttft_s, tpot_s


def with_objectives(
    models: Iterable[ModelSpec], base: dict[str, tuple[float, float]], ttft_scale: float, tpot_scale: float
) -> tuple[ModelSpec, ...]:
    """``models`` with their base objectives times the scales."""
    return tuple(
        replace(m, slo_ttft_s=base[str(m.name)][0] * ttft_scale, slo_tpot_s=base[str(m.name)][1] * tpot_scale)
        for m in models
    )
