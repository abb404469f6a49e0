"""A table made from known constants gives them back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sim.calibrations import calibrated
from prism.core.errors import InvalidValue
from prism.sim.calibrate import (
    TOGETHER_OUTPUT,
    activation_s,
    building_s,
    calibrate,
    fit_crowding,
    fit_sharing,
    plan_run,
    slowdowns,
)
from prism.sim.calibration import (
    Calibration,
    CalibrationFile,
    StepSample,
    fit,
    load_calibration,
    non_negative_least_squares,
)
from prism.sim.cluster_file import parse_cluster
from prism.sim.gpus import gpu
from prism.trace.report import RequestRecord
from prism.trace.row import TraceRow
from tests.sim.helpers import run, tiny_spec

BASE, SEQUENCE, TOKEN, PAIR, CONTEXT = 0.004, 0.0005, 2e-5, 1e-9, 3e-7


def table() -> CalibrationFile:
    samples = []
    for tokens in (16, 64, 256, 1024, 4096):
        seconds = BASE + SEQUENCE + TOKEN * tokens + PAIR * tokens * tokens / 2
        samples.append(StepSample(model="m", kind="prefill", tokens=tokens, seconds=seconds))
    for batch in (1, 2, 4, 8):
        for context in (100, 1000, 4000):
            seconds = BASE + (SEQUENCE + TOKEN) * batch + CONTEXT * context * batch
            samples.append(StepSample(model="m", kind="decode", batch=batch, context=context * batch, seconds=seconds))
    return CalibrationFile(gpu="cpu", machine="test", samples=samples, gpu_overrides={"pcie_bytes_per_s": 1e9})


def test_constants_come_back() -> None:
    calibration = fit(table())
    cpu = calibration.gpu(gpu("cpu"))
    assert cpu.pcie_bytes_per_s == 1e9
    cost = calibration.step_cost(tiny_spec("m"), cpu)
    assert cost is not None
    assert cost.prefill(512, 512 * 256, 0, 1)[0] == pytest.approx(
        BASE + SEQUENCE + TOKEN * 512 + PAIR * 512 * 256, rel=1e-3
    )
    assert cost.decode(3, 900)[0].first_s == pytest.approx(BASE + (SEQUENCE + TOKEN) * 3 + CONTEXT * 900, rel=1e-3)
    assert calibration.step_cost(tiny_spec("other"), cpu) is None
    assert calibration.gpu(gpu("H100")) == gpu("H100")


def test_the_way_through_the_system_is_told_apart_from_a_step() -> None:
    way_s, made = 0.008, table()
    lone = [
        StepSample(model="m", kind="ttft", tokens=s.tokens, seconds=s.seconds + way_s)
        for s in made.samples
        if s.kind == "prefill"
    ]
    steps = [s for s in made.samples if s.kind == "decode"]
    calibration = fit(CalibrationFile(gpu="cpu", machine="test", samples=[*lone, *steps]))
    assert calibration.request_s == pytest.approx(way_s, rel=1e-2)
    cost = calibration.step_cost(tiny_spec("m"), calibration.gpu(gpu("cpu")))
    assert cost is not None
    assert cost.prefill(512, 512 * 256, 0, 1)[0] == pytest.approx(
        BASE + SEQUENCE + TOKEN * 512 + PAIR * 512 * 256, rel=1e-2
    )


def test_what_entering_and_switching_takes_is_told_from_bursts_and_answers_of_two_lengths() -> None:
    way_s, entry_s, switch_s = 0.006, 0.0015, 0.005
    cost = fit(table()).step_cost(tiny_spec("m"), gpu("cpu"))
    assert cost is not None
    assert (cost.entry_s, cost.switch_s) == (0.0, 0.0)  # nothing in that table says it
    measured = []
    for tokens in (16, 64, 256, 1024):
        seconds = way_s + entry_s + cost.prefill(tokens, tokens * tokens / 2, 0, 1)[0]
        measured.append(StepSample(model="m", kind="ttft", tokens=tokens, seconds=seconds))
    for count in (2, 4, 8):  # one enters, then the others
        pairs, others = 64 * 32, count - 1
        seconds = cost.prefill(64, pairs, 0, 1)[0] + cost.prefill(64 * others, pairs * others, 0, others)[0]
        seconds += way_s + entry_s * count
        measured.append(
            StepSample(model="m", kind="ttft", tokens=64 * count, sequences=count, steps=2, seconds=seconds)
        )
    for batch, tokens in ((1, 24), (1, 96), (2, 48), (4, 48), (8, 48)):
        for context in (100, 1000):
            seconds = cost.decode(batch, context * batch)[0].first_s + switch_s / (tokens - 1)
            context_tokens = context * batch
            measured.append(
                StepSample(
                    model="m", kind="decode", batch=batch, tokens=tokens, context=context_tokens, seconds=seconds
                )
            )
    found = fit(CalibrationFile(gpu="cpu", machine="test", samples=measured))
    assert found.request_s == pytest.approx(way_s, rel=0.02)
    assert found.costs["m"]["entry_s"] == pytest.approx(entry_s, rel=0.02)
    assert found.costs["m"]["switch_s"] == pytest.approx(switch_s, rel=0.02)


@pytest.mark.parametrize("earlier", [False, True])
def test_what_an_answer_takes_once_does_not_hide_how_engines_slow_each_other(earlier: bool) -> None:
    step_s, once_s, slower = 0.003, 0.004, {1: 1.0, 2: 1.4, 3: 2.1}
    plan = plan_run(["a", "b", "c"], earlier=earlier)
    together = Counter(row.arrival_s for row in plan.rows[plan.together.start : plan.together.stop])
    records = [
        RequestRecord(
            row=index,
            model=row.model,
            arrival_s=row.arrival_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            ttft_s=0.01,
            tpot_s=step_s * slower[together[row.arrival_s] or 1] + once_s / (row.output_tokens - 1),
        )
        for index, row in enumerate(plan.rows)
    ]
    found = slowdowns(records, plan)
    exact = 0.03 if earlier else 0.01  # lone answers were half as long
    assert found == {2: pytest.approx(1.4, rel=exact), 3: pytest.approx(2.1, rel=exact)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_least_squares_are_optimal_and_not_negative(seed: int, unknowns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((12, unknowns)), rng.standard_normal(12)
    x = non_negative_least_squares(a, b)
    assert (x >= 0).all()
    gradient = a.T @ (a @ x - b)
    assert (gradient >= -1e-6).all()  # no coordinate could grow with gain
    assert abs(gradient @ x) < 1e-6  # and none that is positive could shrink with gain


def test_bad_tables_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"gpu": "cpu"}))
    with pytest.raises(InvalidValue, match="calibration"):
        load_calibration(path)
    bad = CalibrationFile(gpu="cpu", machine="m", samples=[], gpu_overrides={"nonsense": 1.0})
    with pytest.raises(InvalidValue, match="no such rate"):
        fit(bad).gpu(gpu("cpu"))


def test_a_simulated_calibration_run_gives_the_simulator_back() -> None:
    """The whole way round: a run made for calibration, on a modelled CPU, yields that model's step times, the share of
    the cores that an engine takes, and the time of an activation."""
    specs = tuple(tiny_spec(name, keep_alive_s=10.0) for name in ("a", "b", "c"))
    still = {"front": "0", "deliver": "0", "relayout": "0.5s", "wake": "0.1s"}
    group = {"gpu": "cpu", "gpus_per_node": 2, "shared_compute": True, "background_load": 0.2}
    cluster = parse_cluster({"groups": [group], "timing": still}, "test")
    plan = plan_run([s.name for s in specs], pause_s=2.0, keep_alive_s=10.0)
    result, _ = run(cluster, specs, list(plan.rows))
    records = result.world.recorder.records
    made = calibrate((r for r in records if r.row in plan.alone), "cpu", "simulated")
    assert {s.kind for s in made.samples} == {"ttft", "decode"}
    assert fit(made).request_s == pytest.approx(0.0, abs=5e-4)
    assert building_s(records, plan) == pytest.approx(result.stats.activation_s[0], rel=0.1)
    assert activation_s(records, plan) == pytest.approx(result.stats.activation_s[-1], rel=0.1)
    assert building_s(records, plan) - activation_s(records, plan) == pytest.approx(0.4, rel=0.1)
    share, background = fit_sharing(slowdowns(records, plan), cores=2)
    assert share == pytest.approx(0.5, abs=0.03)
    assert background == pytest.approx(0.2, abs=0.05)


def test_engines_that_do_not_disturb_each_other_take_one_core_each() -> None:
    assert fit_sharing({2: 1.0, 3: 0.98}, cores=4) == (0.25, 0.0)
    assert fit_sharing({}, cores=2) == (0.5, 0.0)
    assert fit_sharing({2: 1.28, 3: 1.36}, cores=2) == (0.5, pytest.approx(0.28))  # three at a time were not three
    assert fit_sharing({2: 1.4, 3: 3.0}, cores=2) == (pytest.approx(0.7), pytest.approx(0.0))  # more than sharing
    assert fit_crowding({2: 1.14, 3: 2.28}, 2, 0.57, 0.0) == pytest.approx(2.28 - 3 * 0.57)
    assert fit_crowding({2: 1.4, 3: 1.5}, 2, 0.5, 0.4) == 0.0
    assert fit_crowding({2: 1.4}, 2, 0.5, 0.4) == 0.0
    share, background = fit_sharing({2: 1.3, 3: 1.9}, cores=2)
    assert (share, background) == (pytest.approx(0.6, abs=0.01), pytest.approx(0.1, abs=0.02))


def test_several_calibrations_are_told_of_all() -> None:
    specs = tuple(tiny_spec(name, keep_alive_s=10.0) for name in ("a", "b", "c"))
    plan = plan_run([s.name for s in specs], pause_s=2.0, keep_alive_s=10.0)
    group = {"gpu": "cpu", "gpus_per_node": 2, "shared_compute": True, "background_load": 0.2}
    cluster = parse_cluster({"groups": [group], "timing": {"front": "0", "deliver": "0"}}, "test")
    fast = run(cluster, specs, list(plan.rows))[0].world.recorder.records
    slow = [slower(record, 1.5) for record in fast]
    one, both = calibrated([fast], plan, 2), calibrated([fast, slow], plan, 2)
    assert both.build_s == pytest.approx(1.25 * one.build_s)
    assert both.slower == pytest.approx(one.slower)  # each beside its own lone answers
    step_s, longer_s = (fit(each.table).costs["a"]["overhead_s"] for each in (one, both))
    assert step_s < longer_s < 1.5 * step_s


def test_on_paced_devices_engines_have_turns_of_the_declared_time() -> None:
    specs = tuple(tiny_spec(name, keep_alive_s=10.0) for name in ("a", "b", "c"))
    plan = plan_run([s.name for s in specs], pause_s=2.0, keep_alive_s=10.0)
    cluster = parse_cluster({"groups": [{"gpu": "cpu", "gpus_per_node": 2}], "timing": {"front": "0"}}, "test")
    records = run(cluster, specs, list(plan.rows))[0].world.recorder.records
    alone = [r.tpot_s for r in records if r.row in plan.alone and r.output_tokens == TOGETHER_OUTPUT and r.tpot_s]
    found = calibrated([records], plan, 2, dict.fromkeys("abc", 0.8 * median(alone)))
    assert (found.share, found.background, found.crowding) == (pytest.approx(0.8, rel=0.05), 0.0, 0.0)
    assert found.table.gpu_overrides == {"engine_share": found.share, "thread_share": 0.0}  # of every batch alike
    assert calibrated([records], plan, 2, dict.fromkeys("abc", 1.0)).share == 1.0  # more than it took: all of it


def slower(record: RequestRecord, times: float) -> RequestRecord:
    """The same on a slower machine."""
    assert record.ttft_s is not None and record.tpot_s is not None
    return msgspec.structs.replace(record, ttft_s=times * record.ttft_s, tpot_s=times * record.tpot_s)


def test_only_an_engine_that_had_nobody_takes_longer_for_its_first_step() -> None:
    names = ("overhead_s", "sequence_s", "gemm_token_s", "attention_pair_s", "kv_token_s", "weights_s")
    cost = dict(zip(names, (2e-3, 3e-4, 6e-5, 1e-7, 7e-7, 0.0), strict=True))
    cluster = parse_cluster({"groups": [{"gpu": "cpu", "memory": "900MiB"}]}, "test")
    rows = [TraceRow(0.0, "a", 16, 400), *(TraceRow(at_s, "a", 16, 4) for at_s in (1.2, 1.4, 1.6))]

    def long_s(switch_s: float) -> float:
        calibration = Calibration("cpu", {"engine_share": 0.7}, {"a": {**cost, "entry_s": 0.0, "switch_s": switch_s}})
        records = run(cluster, (tiny_spec("a"),), rows, calibration=calibration)[0].world.recorder.records
        (long,) = [record for record in records if record.output_tokens == 400]
        assert all(long.e2e_s > record.arrival_s + record.e2e_s for record in records if record is not long)
        return long.e2e_s

    assert long_s(0.01) - long_s(0.0) == pytest.approx(0.01)
