"""Every documented counter is there before its first event."""

from __future__ import annotations

from prism.obs import names
from prism.obs.definition import MetricKind
from prism.obs.metrics import Metrics, render
from prism.obs.zeros import export_zeros

COUNTERS = [metric for metric in names.METRICS if metric.kind is MetricKind.COUNTER]


def samples(metrics: Metrics) -> dict[str, float]:
    lines = [line for line in render(metrics).decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_every_counter_is_exported_at_zero() -> None:
    metrics = Metrics()
    export_zeros(metrics, ["a", "b"], ["boss"])
    found = samples(metrics)
    for metric in COUNTERS:
        series = [name for name in found if name.split("{")[0] == metric.name]
        assert series, f"{metric.name} is absent until its first event"
        assert all(found[name] == 0 for name in series)
        if "model" in metric.labels:
            assert {model for model in ("a", "b") if any(f'model="{model}"' in s for s in series)} == {"a", "b"}


def test_what_was_counted_stays_and_new_models_join() -> None:
    metrics = Metrics()
    export_zeros(metrics, ["a"], [])
    metrics.inc(names.PROMPT_TOKENS, 7, model="a")
    export_zeros(metrics, ["a", "new"], [])
    found = samples(metrics)
    assert found['prism_prompt_tokens_total{model="a"}'] == 7
    assert found['prism_prompt_tokens_total{model="new"}'] == 0
