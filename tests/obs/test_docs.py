"""Documentation and dashboard ask for metrics that exist, with labels they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from prism.obs.definition import MetricDef, MetricKind
from prism.obs.names import METRICS

DOCS = Path(__file__).parents[2] / "docs"
KNOWN = {metric.name: metric for metric in METRICS}
SUFFIXES = ("_bucket", "_sum", "_count")


def metric_of(name: str) -> MetricDef | None:
    """The metric that a time series belongs to."""
    if name in KNOWN and KNOWN[name].kind is not MetricKind.HISTOGRAM:
        return KNOWN[name]
    for suffix in SUFFIXES:
        base = KNOWN.get(name.removesuffix(suffix))
        if name.endswith(suffix) and base is not None and base.kind is MetricKind.HISTOGRAM:
            return base
    return None


def check_query(query: str) -> None:
    series = re.findall(r"\b(prism_\w+)(\{[^}]*\})?", query)
    assert series, query
    labels: set[str] = set()
    for name, selector in series:
        metric = metric_of(name)
        assert metric is not None, f"{name} does not exist: {query}"
        labels |= set(metric.labels)
        for label in re.findall(r"(\w+)=", selector):
            assert label in metric.labels, f"{name} has no label {label}: {query}"
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        assert {label.strip() for label in group.split(",")} <= labels | {"le"}, query
    assert query.count("(") == query.count(")")


@pytest.mark.parametrize("metric", [metric for metric in METRICS if metric.promql], ids=lambda metric: metric.name)
def test_queries_of_the_definitions(metric: MetricDef) -> None:
    check_query(metric.promql)


def test_queries_of_the_documentation() -> None:
    text = (DOCS / "metrics.md").read_text()
    queries = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    assert len(queries) > len(METRICS) / 2
    for query in queries:
        check_query(query)
    for metric in METRICS:
        assert f"`{metric.name}`" in text


def test_dashboard() -> None:
    board = json.loads((DOCS / "grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel["targets"]:
            check_query(target["expr"])
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert any(label in metric.labels for metric in METRICS)


def test_code_uses_no_metric_that_is_not_defined() -> None:
    root = DOCS.parent / "prism"
    for file in root.rglob("*.py"):
        if file.parent.name == "obs":
            continue
        for name in re.findall(r"[\"'](prism_[a-z_]+_(?:total|seconds|bytes))[\"']", file.read_text()):
            assert metric_of(name) is not None, f"{file} writes out {name}"
