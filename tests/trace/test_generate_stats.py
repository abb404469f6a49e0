"""The generator makes what the published facts say, and the statistics measure what they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from prism.core.errors import InvalidValue
from prism.trace.files import open_trace
from prism.trace.generate import PRESETS, GeneratorSpec, generate, preset
from prism.trace.row import TraceRow
from prism.trace.stats import TraceStats, trace_stats
from prism.trace.stats_view import figure_2, summary_rows
from tests.trace.helpers import original, row, steady


@pytest.mark.parametrize("name", ["hyperbolic", "arena", "novita"])
def test_same_seed_same_rows_in_order(name: str) -> None:
    spec = replace(preset(name), duration_s=120.0)
    rows = list(generate(spec, seed=4))
    assert rows == list(generate(spec, seed=4))
    assert rows != list(generate(spec, seed=5))
    times = [r.arrival_s for r in rows]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 120


def test_mean_rate_comes_out_as_asked() -> None:
    spec = GeneratorSpec(models=6, duration_s=5_000, rate_rps=3.0, on_s=20, off_s=30)
    assert len(list(generate(spec, seed=0))) == pytest.approx(15_000, rel=0.05)
    for seed in range(5):
        assert len(list(generate(preset("hyperbolic"), seed))) == pytest.approx(600 * 2.83, rel=0.2)


def test_endless_generation_streams() -> None:
    assert len(list(islice(generate(replace(preset("novita"), duration_s=1e5), seed=0), 2000))) == 2000


def medians(name: str, seeds: int = 5) -> dict[str, float]:
    found = [trace_stats(generate(preset(name), seed)) for seed in range(seeds)]
    return {
        "top40": float(np.median([s.top_40_share for s in found])),
        "idle": float(np.median([s.idle_per_hour.p50 for s in found])),
        "cv": float(np.median([s.cv_per_minute.p50 for s in found if s.cv_per_minute])),
        "changes": float(np.median([s.changes_5x_share for s in found])),
    }


def test_novita_preset_has_the_papers_popularity() -> None:
    """About 60% of the models make a quarter of the requests; half of the models have more than 40 idle intervals per
    hour; rates change 5-fold within a minute."""
    found = medians("novita", seeds=2)
    assert found["top40"] == pytest.approx(0.75, abs=0.04)
    assert found["idle"] > 40
    assert found["changes"] > 0.5


@pytest.mark.parametrize("name", ["hyperbolic", "arena"])
def test_presets_are_like_the_traces_they_are_named_after(name: str) -> None:
    found = medians(name)
    assert 0.65 < found["top40"] < 0.97
    assert 20 < found["idle"] < 90
    assert 0.6 < found["cv"] < 1.6


def test_bad_specs_are_named() -> None:
    with pytest.raises(InvalidValue, match="rate_rps"):
        GeneratorSpec(rate_rps=0)
    with pytest.raises(InvalidValue, match="names"):
        GeneratorSpec(models=3, names=("a",))
    with pytest.raises(InvalidValue, match="choices: arena"):
        GeneratorSpec(lengths="long")
    with pytest.raises(InvalidValue, match="choices: hyperbolic"):
        preset("x")
    assert all(spec.models for spec in PRESETS.values())


# --- statistics -----------------------------------------------------------------------------------------------------


def brute_idle(rows: list[TraceRow], model: str) -> list[float]:
    end_s = rows[-1].arrival_s
    times = [0.0, *(r.arrival_s for r in rows if r.model == model), end_s]
    return [gap for gap in np.diff(times) if gap > 10]


def test_statistics_against_plain_numpy() -> None:
    rows = list(generate(preset("arena"), seed=2))
    stats = trace_stats(rows)
    for model in stats.models:
        times = np.array([r.arrival_s for r in rows if r.model == model.model])
        idle = brute_idle(rows, model.model)
        assert model.requests == len(times)
        assert model.idle_per_hour == pytest.approx(len(idle) / stats.span_s * 3600)
        assert model.idle_median_s == (pytest.approx(float(np.median(idle))) if idle else None)
        minutes = np.histogram(times, np.arange(0, 60 * (stats.span_s // 60) + 1, 60))[0]
        assert model.cv_per_minute == pytest.approx(minutes.std() / minutes.mean())
        if model.gap_cv is not None:
            gaps = np.diff(times)
            assert model.gap_cv == pytest.approx(gaps.std() / gaps.mean())
    prompts = [r.prompt_tokens for r in rows]
    assert stats.prompt_tokens is not None
    assert stats.prompt_tokens.p50 == pytest.approx(float(np.percentile(prompts, 50)), abs=1)


def test_rate_change_sees_a_burst() -> None:
    rows = [row(t) for t in np.arange(0, 60, 5)] + [row(60 + t) for t in np.arange(0, 10, 0.5)] + [row(85.0)]
    assert trace_stats(rows).models[0].rate_change == pytest.approx(20.0)


def test_empty_and_tiny_traces() -> None:
    assert trace_stats([]).requests == 0
    tiny = trace_stats([row(0.0)])
    assert tiny.cv_per_minute is None
    assert tiny.models[0].share == 1.0
    assert summary_rows(tiny)


@pytest.mark.parametrize(
    ("name", "top10", "top40", "idle", "cv50", "cv90"),
    [
        ("arena_vtc_27m", 0.505, 0.826, 54, 0.93, 2.45),
        ("arena_prism_e2e_8m", 0.393, 0.899, 33, 1.41, 2.36),
        ("hyperbolic_fig_7m_digitised", 0.682, 0.929, 30, 0.85, 1.13),
    ],
)
def test_recorded_traces_have_the_published_statistics(
    name: str, top10: float, top40: float, idle: float, cv50: float, cv90: float
) -> None:
    stats = trace_stats(open_trace(original(name)).rows())
    assert stats.cv_per_minute is not None
    assert stats.top_10_share == pytest.approx(top10, abs=0.001)
    assert stats.top_40_share == pytest.approx(top40, abs=0.001)
    assert stats.idle_per_hour.p50 == pytest.approx(idle, abs=0.5)
    assert stats.cv_per_minute.p50 == pytest.approx(cv50, abs=0.01)
    assert stats.cv_per_minute.p90 == pytest.approx(cv90, abs=0.01)


def test_arena_stretched_is_as_idle_as_the_paper_says() -> None:
    """Half of the models with a median idle interval above 80 s once the compressed time is stretched."""
    rows = (replace(r, arrival_s=r.arrival_s * 12.5) for r in open_trace(original("arena_vtc_27m")).rows())
    stats: TraceStats = trace_stats(rows)
    assert stats.idle_median_s is not None
    assert stats.idle_median_s.p50 > 80


def test_figure_2_is_one_svg_and_deterministic() -> None:
    stats = trace_stats(steady(2000))
    svg = figure_2([("one", stats), ("two", stats)])
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert svg == figure_2([("one", stats), ("two", stats)])


@pytest.mark.parametrize("bad", [{"off_s": -1.0}, {"off_level": -0.1}, {"level_sigma": -1.0}, {"duration_s": 0.0}])
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(bad))):
        GeneratorSpec(**bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="differ"):
        GeneratorSpec(models=2, names=("a", "a"))
