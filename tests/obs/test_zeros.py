"""Every documented counter is there before its first event, and what was counted is left as it is."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from prism.obs import names
from prism.obs.definition import MetricKind
from prism.obs.metrics import Metrics, render
from prism.obs.zeros import Zeros

COUNTERS = [metric for metric in names.METRICS if metric.kind is MetricKind.COUNTER]


def samples(text: bytes) -> dict[str, float]:
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert len(found) == len(lines), "a series stands there twice"
    return found


def test_every_counter_is_exported_at_zero() -> None:
    found = samples(Zeros(["a", "b"], ["boss"]).complete(render(Metrics())))
    for metric in COUNTERS:
        series = [name for name in found if name.split("{")[0] == metric.name]
        assert series, f"{metric.name} is absent until its first event"
        assert all(found[name] == 0 for name in series)
        if "model" in metric.labels:
            assert {model for model in ("a", "b") if any(f'model="{model}"' in s for s in series)} == {"a", "b"}


def test_what_was_counted_stays_and_new_models_join() -> None:
    metrics = Metrics()
    metrics.inc(names.PROMPT_TOKENS, 7, model="a")
    metrics.observe(names.TTFT_SECONDS, 0.5, model="a", device="d")
    counted = samples(render(metrics))
    found = samples(Zeros(["a", "new"], []).complete(render(metrics)))
    assert found['prism_prompt_tokens_total{model="a"}'] == 7
    assert found['prism_prompt_tokens_total{model="new"}'] == 0
    assert counted.items() <= found.items()


def test_the_text_is_the_exposition_format_with_any_name() -> None:
    odd = 'org/"odd"\\name\nof a model'
    metrics = Metrics()
    metrics.inc(names.PROMPT_TOKENS, 3, model=odd)
    text = Zeros([odd, "plain"], []).complete(render(metrics)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    prompts = {s.labels["model"]: s.value for s in families["prism_prompt_tokens"].samples if s.name.endswith("_total")}
    assert prompts == {odd: 3.0, "plain": 0.0}


def test_without_anything_counted_the_families_are_made() -> None:
    found = samples(Zeros(["a"], []).complete(b""))
    assert found['prism_prompt_tokens_total{model="a"}'] == 0
