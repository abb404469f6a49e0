"""Transforms keep order and what they promise to keep."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.errors import InvalidValue
from prism.trace.generate import generate, preset
from prism.trace.lengths import LEVELS, TABLES, length_table, quantile
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
from prism.trace.stats import trace_stats
from prism.trace.steps import STEPS, Step, apply_steps, count_models, info_after
from prism.trace.transform import (
    change_rate,
    fill_lengths,
    fold,
    rename_models,
    scale_lengths,
    scale_time,
    split,
    window,
)
from tests.trace.helpers import row, steady

TIMES = st.lists(st.floats(0, 100), max_size=40).map(sorted)


def test_window_counts_from_its_start() -> None:
    found = list(window(steady(100), 2.0, 3.0))
    assert len(found) == 10
    assert 0 <= found[0].arrival_s < 0.1
    with pytest.raises(InvalidValue, match="window"):
        list(window([], 3.0, 2.0))


@given(TIMES, st.floats(0.01, 100))
def test_time_scaling_keeps_order(times: list[float], factor: float) -> None:
    found = [r.arrival_s for r in scale_time([row(t) for t in times], factor)]
    assert found == sorted(found) == [t * factor for t in times]


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(0.01, 10), st.integers(2, 10**5))
def test_lengths_fit_the_context(prompt: int, output: int, factor: float, most: int) -> None:
    (found,) = scale_lengths([row(0.0, prompt=prompt, output=output)], factor, factor, most_total=most)
    assert found.prompt_tokens is not None
    assert found.output_tokens is not None
    assert found.prompt_tokens >= 1
    assert found.output_tokens >= 1
    assert found.prompt_tokens + found.output_tokens <= most


def test_unknown_lengths_stay_unknown_until_filled() -> None:
    rows = list(scale_lengths([row(0.0, prompt=None, output=None)], 2.0))
    assert rows[0].prompt_tokens is None
    (filled,) = fill_lengths(rows, length_table("arena"), seed=1)
    assert filled.prompt_tokens
    assert filled.output_tokens
    (kept,) = fill_lengths([row(0.0, prompt=7, output=None)], length_table("arena"), seed=1)
    assert kept.prompt_tokens == 7


@given(TIMES, st.floats(0.1, 8), st.integers(0, 5))
def test_rate_change_keeps_order_and_originals(times: list[float], factor: float, seed: int) -> None:
    rows = [row(t, f"m{i % 3}") for i, t in enumerate(times)]
    found = list(change_rate(rows, factor, seed))
    arrivals = [r.arrival_s for r in found]
    assert arrivals == sorted(arrivals)
    assert len(rows) * math.floor(factor) <= len(found) <= len(rows) * math.ceil(factor)
    if factor >= 1:
        assert not Counter(rows) - Counter(found)
    assert found == list(change_rate(rows, factor, seed))


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.5])
def test_rate_change_keeps_the_pattern(factor: float) -> None:
    """Requests per 10 s of each model keep their shape: correlated with the original, at the new rate."""
    rows = list(generate(preset("hyperbolic"), seed=3))
    changed = list(change_rate(rows, factor, seed=1))
    assert len(changed) == pytest.approx(factor * len(rows), rel=0.08)
    before, after = (Counter((r.model, r.arrival_s // 10) for r in some) for some in (rows, changed))
    error = sum(abs(after[key] - factor * count) for key, count in before.items()) / (factor * len(rows))
    assert error < 0.3
    old, new = trace_stats(rows), trace_stats(changed)
    assert new.top_40_share == pytest.approx(old.top_40_share, abs=0.05)


def test_copies_are_conversations_of_their_own() -> None:
    original = TraceRow(1.0, "a", 10, 5, "s", (1, 2))
    first, copy = change_rate([original], 2.0, seed=0)
    assert first == original
    assert copy.session == "s#1"
    assert not set(copy.prefix_hashes) & set(original.prefix_hashes)


@pytest.mark.parametrize("how", ["rank", "balance"])
def test_fold_uses_every_target(how: str) -> None:
    names = fold({f"m{i}": 100 - i for i in range(27)}, ["a", "b", "c"], how)
    assert set(names.values()) == {"a", "b", "c"}
    assert len(names) == 27


def test_balance_is_balanced_and_rank_keeps_skew() -> None:
    requests = {"big": 100, "mid": 50, "small": 50}
    assert fold(requests, ["a", "b"], "balance") == {"big": "a", "mid": "b", "small": "b"}
    assert fold(requests, ["a", "b"]) == {"big": "a", "mid": "b", "small": "a"}
    with pytest.raises(InvalidValue, match="between 1 and"):
        fold(requests, ["a", "b", "c", "d"])
    with pytest.raises(InvalidValue, match="choices: rank, balance"):
        fold(requests, ["a"], "other")


def test_rename_names_the_unknown_model() -> None:
    with pytest.raises(InvalidValue, match="row 1: model"):
        list(rename_models([row(0.0, "a"), row(1.0, "b")], {"a": "x"}))


def test_split_is_skewed_and_keeps_sessions_together() -> None:
    rows = [TraceRow(float(i), "", 1, 1, f"s{i % 500}") for i in range(2000)]
    found = list(split(rows, ["a", "b", "c"], 1.5, seed=0))
    counts = Counter(r.model for r in found)
    assert counts["a"] > counts["b"] > counts["c"] > 0
    homes: dict[str | None, set[str]] = {}
    for r in found:
        homes.setdefault(r.session, set()).add(r.model)
    assert all(len(models) == 1 for models in homes.values())


def test_steps_are_data() -> None:
    steps = [
        {"step": "window", "start_s": 1.0},
        {"step": "lengths", "prompt": 0.25},
        {"step": "models", "names": {"m0": "x", "m1": "y"}},
        {"step": "only", "models": ["x"]},
        {"step": "rate", "factor": 2.0},
        {"step": "time", "factor": 0.5},
    ]
    found = list(apply_steps(steady(100), steps))
    assert len(found) == 90
    assert count_models(found) == {"x": 90}
    info = info_after(TraceInfo({}, 512), steps)
    assert info.block_tokens == 128
    assert [step["step"] for step in info.provenance["steps"]] == [step["step"] for step in steps]


@pytest.mark.parametrize("step", [{"step": "nope"}, {}, {"step": "time"}, {"step": "rate", "speed": 2}])
def test_bad_steps_are_named(step: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        list(apply_steps(steady(3), [step]))
    assert STEPS


@pytest.mark.parametrize("name", list(TABLES))
def test_length_tables(name: str) -> None:
    table = length_table(name)
    for values in (table.prompt, table.output):
        assert list(values) == sorted(values)
        assert [quantile(values, level) for level in LEVELS] == [max(1, v) for v in values]


def test_models_are_renamed_and_picked_by_name() -> None:
    rows = [row(0.0, "a"), row(1.0, "b"), row(2.0, "c")]
    steps: list[Step] = [{"step": "only", "models": ["a", "b"]}, {"step": "rename", "names": {"a": "x"}}]
    assert [r.model for r in apply_steps(rows, steps)] == ["x", "b"]


@pytest.mark.parametrize("limit", [{"most_prompt": 0}, {"most_output": 0}, {"most_total": 1}])
def test_limits_leave_room_for_a_token(limit: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(limit))):
        list(scale_lengths([row(0.0)], **limit))
