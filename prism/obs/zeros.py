"""Counters at zero before their first event: a counter that appears with its first event shows no increase for it, and
alerts and dashboards cannot tell "never" from "not measured"."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Final

from prism.obs import names
from prism.obs.definition import MetricDef, MetricKind
from prism.obs.metrics import Metrics

OUTCOMES: Final = ("ok", "rejected", "failed", "cancelled", "invalid")
REASONS: Final = ("queue_full", "rate_limit", "draining", "too_large", "unauthorized", "forbidden")
PROCESSES: Final = ("valkey", "front", "controller", "agent", "zygote")

_VALUES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    names.REQUESTS.name: {"outcome": OUTCOMES},
    names.SLO.name: {"objective": ("ttft", "tpot"), "met": ("true", "false")},
    names.REFUSED.name: {"reason": REASONS},
    names.HTTP.name: {
        "method": ("POST",),
        "route": ("/v1/chat/completions", "/v1/completions"),
        "status": ("200",),
    },
    names.ACTIVATIONS.name: {"source": ("disk",), "outcome": ("ok", "failed")},
    names.WEIGHT_ARRIVALS.name: {"outcome": ("ok", "failed")},
    names.DECISIONS.name: {"scheduler": ("cluster", "device"), "action": ("Activate",), "reason": ("demand",)},
    names.EVICTIONS.name: {"reason": ("make_room",)},
    names.RESTARTS.name: {"process": PROCESSES},
    names.STORE_ERRORS.name: {"process": ("front", "controller", "agent")},
    names.RELOADS.name: {"outcome": ("applied", "unchanged", "invalid")},
}
"""What labels other than ``model`` and ``key`` can be, or one value of theirs where only events tell."""


def export_zeros(metrics: Metrics, models: Iterable[str], keys: Iterable[str]) -> None:
    """Makes every counter appear: for all ``models`` and ``keys``, devices and machines being told by events only
    (``""`` until then). What was counted stays."""
    known = {"model": tuple(models), "key": tuple(keys)}
    for metric in names.METRICS:
        if metric.kind is MetricKind.COUNTER:
            _export(metrics, metric, known)


def _export(metrics: Metrics, metric: MetricDef, known: dict[str, tuple[str, ...]]) -> None:
    values = {**known, **_VALUES.get(metric.name, {})}
    for combination in product(*(values.get(label, ("",)) for label in metric.labels)):
        metrics.inc(metric, 0.0, **dict(zip(metric.labels, combination, strict=True)))
