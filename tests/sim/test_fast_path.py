"""Taking decode steps together gives the same decisions and times as taking them one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.sim.calibration import Calibration
from prism.sim.cluster_file import parse_cluster
from tests.sim.helpers import h100s, llamas, random_rows, run, tiny_spec


def assert_same(left: object, right: object, where: str = "") -> None:
    """Equal but for the last digits of numbers."""
    if isinstance(left, float) or isinstance(right, float):
        assert left == pytest.approx(right, rel=1e-6, abs=2e-6), where
    elif isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list) and isinstance(right, list):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert left == right, where


def assert_same_runs(*args: object, **kwargs: object) -> None:
    fast, fast_log = run(*args, fast=True, **kwargs)  # type: ignore[arg-type]
    slow, slow_log = run(*args, fast=False, **kwargs)  # type: ignore[arg-type]
    assert_same(fast_log, slow_log, "log")
    assert fast.stats.steps == slow.stats.steps
    assert fast.stats.retractions == slow.stats.retractions
    assert fast.stats.events < slow.stats.events
    for a, b in zip(fast.world.recorder.records, slow.world.recorder.records, strict=True):
        assert (a.row, a.model, a.error, a.output_tokens) == (b.row, b.model, b.error, b.output_tokens)
        assert a.ttft_s == pytest.approx(b.ttft_s, rel=1e-7, abs=1e-7)
        assert a.e2e_s == pytest.approx(b.e2e_s, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("policy", ["prism", "static", "muxserve", "qlm"])
def test_every_policy_with_ample_memory(policy: str) -> None:
    models = llamas(4)
    assert_same_runs(h100s(2), models, random_rows([m.name for m in models], 1, 120, 60.0), policy)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(5, 60),
    span_s=st.floats(0.5, 30.0),
    memory_mb=st.integers(900, 2500),
    policy=st.sampled_from(["prism", "muxserve", "static"]),
    blocks=st.sampled_from([0, 4]),
)
def test_tight_memory_with_retraction_and_caches(
    seed: int, count: int, span_s: float, memory_mb: int, policy: str, blocks: int
) -> None:
    models = tuple(tiny_spec(f"m{i}", slo_ttft_s=0.2 + i) for i in range(3))
    rows = random_rows([m.name for m in models], seed, count, span_s, prompt=4000, output=3000, blocks=blocks)
    assert_same_runs(h100s(1, memory=f"{memory_mb}MiB"), models, rows, policy)


def test_tensor_parallel_neighbours_and_faults() -> None:
    base = llamas(4)
    models = (replace(base[0], tp=2), *base[1:])
    faults = [
        {"at": "10s", "kind": "straggler", "target": "node0/cuda:0", "speed": 0.3},
        {"at": "20s", "kind": "straggler", "target": "node0/cuda:0", "speed": 1.0},
        {"at": "30s", "kind": "gpu_fails", "target": "node0/cuda:1"},
    ]
    cluster = h100s(4, faults=faults)
    assert_same_runs(cluster, models, random_rows([m.name for m in models], 3, 200, 60.0))


def test_measured_costs_of_entering_and_switching_on_shared_cores() -> None:
    names = ("overhead_s", "sequence_s", "gemm_token_s", "attention_pair_s", "kv_token_s", "weights_s")
    cost = dict(zip(names, (2e-3, 3e-4, 6e-5, 1e-7, 7e-7, 0.0), strict=True))
    costs = {name: {**cost, "entry_s": 1.5e-3, "switch_s": 6e-3} for name in ("a", "b", "c")}
    group = {"gpu": "cpu", "gpus_per_node": 2, "memory": "900MiB", "shared_compute": True}
    models = tuple(tiny_spec(name) for name in costs)
    rows = random_rows(costs, 5, 150, 20.0, prompt=400, output=60)
    calibration = Calibration("cpu", {"engine_share": 0.7}, costs)
    assert_same_runs(parse_cluster({"groups": [group]}, "test"), models, rows, "muxserve", calibration=calibration)
