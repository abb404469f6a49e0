"""How one metric is declared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""From one decode step of a small model to a cold start that waits for room."""
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
"""Time per output token."""
FAST_BUCKETS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Decisions and other work of microseconds to milliseconds."""

Merge = Literal["livesum", "livemostrecent", "mostrecent"]
"""How a gauge that several processes set becomes one value; ``live`` ones drop the values of processes that ended."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricDef:
    """One metric: what it is called, what it means, who is told apart."""

    kind: MetricKind
    name: str
    """As Prometheus shows it; counters end in ``_total``, everything else in its unit."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    merge: Merge = "livemostrecent"
    promql: str = ""
    """The query most people want of it; printed in the documentation."""


def counter(name: str, text: str, *labels: str, promql: str = "") -> MetricDef:
    return MetricDef(MetricKind.COUNTER, name, text, labels, promql=promql)


def gauge(name: str, text: str, *labels: str, merge: Merge = "livemostrecent", promql: str = "") -> MetricDef:
    return MetricDef(MetricKind.GAUGE, name, text, labels, merge=merge, promql=promql)


def histogram(
    name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS, promql: str = ""
) -> MetricDef:
    return MetricDef(MetricKind.HISTOGRAM, name, text, labels, buckets, promql=promql)
