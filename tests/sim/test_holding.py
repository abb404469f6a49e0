"""Simulated engines that stand still for others (``longest_pause``)."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.core.effects import Hold
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.holding import HeldEngines
from prism.sim.queue import EventQueue
from prism.sim.run import SimResult, SimSpec, simulate
from prism.trace.row import TraceRow
from tests.sim.helpers import h100s, llamas, random_rows, tiny_spec


def pausing(
    models: tuple[ModelSpec, ...],
    rows: list[TraceRow],
    longest_s: float = 0.3,
    fast: bool = True,
    gpus: int = 1,
    **cluster: object,
) -> tuple[SimResult, list[str]]:
    """The result and the decision log."""
    preset, lines = PolicySettings(), list[str]()
    policy = replace(preset, gpu=replace(preset.gpu, longest_pause_s=longest_s))
    spec = SimSpec(h100s(gpus, 1, **cluster), models, policy, lambda: rows, preload_share=1.0, fast=fast)
    return simulate(spec, lines.append), lines


def four(tpot_s: float) -> tuple[ModelSpec, ...]:
    return tuple(replace(model, slo_tpot_s=tpot_s) for model in llamas(4))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), tpot_ms=st.floats(4.0, 40.0), memory_mb=st.integers(900, 2500))
def test_steps_taken_together_are_those_taken_one_by_one(seed: int, tpot_ms: float, memory_mb: int) -> None:
    models = tuple(replace(tiny_spec(f"m{i}", slo_ttft_s=0.2 + i), slo_tpot_s=tpot_ms / 1000) for i in range(3))
    rows = random_rows([m.name for m in models], seed, 40, 10.0, prompt=4000, output=3000)
    fast, log = pausing(models, rows, fast=True, memory=f"{memory_mb}MiB")
    slow, slow_log = pausing(models, rows, fast=False, memory=f"{memory_mb}MiB")
    assert [(a.row, a.error, a.output_tokens) for a in fast.world.recorder.records] == [
        (b.row, b.error, b.output_tokens) for b in slow.world.recorder.records
    ]
    assert fast.stats.steps == slow.stats.steps
    assert len(log) == len(slow_log)
    ends_s = [[r.e2e_s for r in run.world.recorder.records] for run in (fast, slow)]
    assert ends_s[0] == pytest.approx(ends_s[1], rel=1e-6, abs=1e-6)


def test_more_answers_keep_their_time_per_token() -> None:
    models = four(0.0155)
    rows = random_rows([m.name for m in models], 1, 150, 60.0, output=400)
    with_it, log = pausing(models, rows)
    one_by_one, _ = pausing(models, rows, fast=False)
    without, _ = pausing(models, rows, longest_s=0.0)
    assert with_it.report.all.attainment.both > without.report.all.attainment.both
    assert with_it.stats.held_s > 0.0 == without.stats.held_s
    assert with_it.stats.held_s == pytest.approx(one_by_one.stats.held_s, rel=1e-6)
    assert any('"do":"Hold"' in line and '"code":"bears_a_pause"' in line for line in log)


def test_nobody_stands_still_where_all_are_in_time() -> None:
    models = four(0.5)
    result, _ = pausing(models, random_rows([m.name for m in models], 1, 100, 60.0))
    assert result.stats.held_s == 0.0


def test_engines_of_several_devices_never_do() -> None:
    models = tuple(replace(model, tp=2) for model in four(0.009))
    rows = random_rows([m.name for m in models], 1, 150, 60.0, output=400)
    assert pausing(models, rows, gpus=2)[0].stats.held_s == 0.0


def test_all_answers_end_whatever_stands_still() -> None:
    models = four(0.002)
    rows = random_rows([m.name for m in models], 2, 100, 10.0)
    result, _ = pausing(models, rows)
    assert result.stats.never_ended == 0
    assert [r.error for r in result.world.recorder.records if r.error] == []
    assert len(result.world.recorder.records) == 100


def test_a_device_that_fails_while_engines_stand_still_gives_its_requests_back() -> None:
    models = four(0.0155)
    rows = random_rows([m.name for m in models], 3, 120, 10.0, output=400)
    faults = [{"at": "5s", "kind": "gpu_fails", "target": "node0/cuda:0"}]
    result, log = pausing(models, rows, gpus=2, faults=faults)
    failed = result.world.devices[DeviceId("node0/cuda:0")]
    assert failed.gone
    assert sum('"do":"Hold"' in line for line in log) > 10
    assert result.stats.never_ended == 0


def test_engines_go_on_in_the_order_in_which_they_were_stopped() -> None:
    """And not in one that their names hash to: the same run would have other times in another process."""
    keys = [InstanceKey(ModelName(f"m{i}"), Generation(1)) for i in range(12)]
    went_on: list[InstanceKey] = []
    engines = {key: Mock(go_on=lambda now_s, key=key: went_on.append(key)) for key in keys}
    holds = [Hold(key, 0.1, because(ReasonCode.BEARS_A_PAUSE)) for key in keys]
    pauses = Mock(wanted=True, next_look_s=float("inf"), look=Mock(side_effect=[holds, []]))
    queue = EventQueue()
    held = HeldEngines(queue, pauses, engines, lambda hold: None)
    for at_s in (1.0, 2.0):
        queue.run_until(at_s)
        held.changed()
        queue.run_until(at_s)
    assert went_on == keys
