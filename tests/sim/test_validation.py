"""What a validation against live runs draws, and how it judges."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import httpx
import pytest

from benchmarks.sim.validate import warm_up
from benchmarks.sim.validation import Kv, Outcome, alone_s, looks, missed, summary, table
from benchmarks.sim.validation_runs import MOST_OUTPUT, MOST_PROMPT, POLICIES, RATES, TRACES, runs
from prism.trace.report import RequestRecord
from tests.e2e.server import Server
from tests.sim.helpers import h100s, llamas, random_rows, run

MODELS = ("a", "b", "c")
LIVE = Outcome(1.0, 0.99, 0.010, 0.100, 0.003, 6, 0, 150, Kv(4e6, 8_000_000, 9000, 4000, 0))


@pytest.mark.parametrize("seed", [11, 23])
def test_every_run_has_requests_enough_for_a_p99(seed: int) -> None:
    for one in runs(TRACES, RATES, POLICIES[:1], None, seed):
        rows = one.draw.rows(MODELS)
        assert len(rows) == one.draw.rate * one.draw.seconds >= 140
        assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))
        assert rows[-1].arrival_s == pytest.approx(one.draw.seconds)
        assert {row.model for row in rows} <= set(MODELS)
        assert all(row.prompt_tokens <= MOST_PROMPT and row.output_tokens <= MOST_OUTPUT for row in rows)  # type: ignore[operator]


def test_a_draw_is_fixed_by_its_seed_and_named_by_it() -> None:
    one, again, other = (runs(["arena"], [2.0], ["prism"], 40.0, seed)[0] for seed in (1, 1, 2))
    assert one.name == again.name == "arena-2-40s-seed1-prism"
    assert one.draw.rows(MODELS) == again.draw.rows(MODELS)
    assert other.name != one.name
    assert other.draw.rows(MODELS) != one.draw.rows(MODELS)
    longer = runs(["arena"], [2.0], ["prism"], 50.0, 1)[0]
    assert longer.name != one.name  # runs of another length are not gone on with, either


@pytest.mark.parametrize(
    ("live", "modelled", "fails"),
    [(6, 7, False), (6, 8, True), (0, 1, False), (0, 2, True), (30, 33, False), (30, 34, True)],
)
def test_few_activations_may_be_off_by_one_and_many_by_a_tenth(live: int, modelled: int, fails: bool) -> None:
    found = missed(replace(LIVE, activations=live), replace(LIVE, activations=modelled))
    assert found == ["activations"] * fails


def test_misses_are_named_and_counted() -> None:
    late = replace(LIVE, median_s=0.012, p99_s=0.200, attainment=0.96)
    assert missed(LIVE, late) == ["median", "p99"]
    rows = [("one", LIVE, LIVE), ("two", LIVE, late)]
    assert table(rows).splitlines()[-1].endswith("| median, p99 |")
    assert "goodput 2, median 1, p99 1, tpot 2, activations 2; 1 without a miss" in summary(rows)
    assert "12 live, 12 simulated" in summary(rows)


def test_time_per_token_and_goodput_are_goals() -> None:
    assert missed(LIVE, replace(LIVE, tpot_s=0.004)) == ["tpot"]
    assert missed(LIVE, replace(LIVE, goodput=0.90)) == ["goodput"]


def test_both_sides_are_looked_at_once_a_second() -> None:
    rows = random_rows(["m0", "m1"], 1, 40, 20.0)
    result, _ = run(h100s(1), llamas(2), rows, sample_every_s=0.25)
    samples = result.report.timeline.samples
    assert samples[0].t_s == 0.0  # the time before the trace is not part of the run
    assert all(b.t_s - a.t_s == pytest.approx(0.25) for a, b in pairwise(samples))
    assert all(b.t_s - a.t_s == pytest.approx(1.0) for a, b in pairwise(looks(result.report)))


def _record(at_s: float, tpot_s: float, e2e_s: float, model: str = "a", tokens: int = 50) -> RequestRecord:
    return RequestRecord(
        row=0,
        model=model,
        arrival_s=at_s,
        prompt_tokens=5,
        output_tokens=tokens,
        ttft_s=0.01,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
    )


def test_how_fast_the_machine_is_shows_in_requests_that_overlap_with_none() -> None:
    lone = [_record(float(i), 0.002, 0.5) for i in range(4)]
    overlapping = [_record(10.0, 0.9, 1.0), _record(10.5, 0.9, 3.0), _record(11.2, 0.9, 0.1)]
    short, other = _record(20.0, 0.9, 0.1, tokens=2), _record(21.0, 0.004, 0.5, "b")
    assert alone_s([*overlapping, other, short, *reversed(lone)]) == pytest.approx(0.002)
    assert alone_s(overlapping) is None


def test_only_models_that_the_run_asks_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def post(url: str, json: dict[str, object], timeout: float) -> httpx.Response:
        asked.append(str(json["model"]))
        return httpx.Response(200, text="data: [DONE]", request=httpx.Request("POST", url))

    monkeypatch.setattr(httpx, "post", post)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    warm_up(LeavingServer(), {"b", "a"}, leave=True)
    assert asked == ["a", "b"] * 3
    assert sorted(LeavingServer.left) == ["a", "b"]


class LeavingServer(Server):
    """Models leave at once."""

    left: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:1"

    def wait_unloaded(self, model: str) -> None:
        self.left.append(model)
