"""Whole runs: determinism, activation phases, prefixes, objectives, capacity, sweeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prism.core.device_events import EngineUp, GpuEvent
from prism.core.errors import InvalidValue
from prism.core.ids import DeviceId
from prism.core.pace import DevicePace
from prism.core.settings import PolicySettings
from prism.core.specs import DeviceKind
from prism.policy.profiles import step_rates
from prism.sim.capacity import fewest_gpus
from prism.sim.cluster_file import load_cluster, parse_cluster
from prism.sim.device import SimDevice
from prism.sim.inputs import Inputs, resized
from prism.sim.models import known_spec
from prism.sim.objectives import dedicated_objectives, with_objectives
from prism.sim.run import SimSpec, simulate
from prism.sim.sweep import Axes, Point, sweep_points, variants
from prism.trace.files import write_trace
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
from tests.sim.helpers import h100s, llamas, random_rows, run, tiny_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "sim"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def activation_s(mode: str, gpus: int = 8, tp: int = 1, pool: bool = True, **sections: object) -> float:
    settings = PolicySettings.named("prism")
    settings = replace(settings, cluster=replace(settings.cluster, engine_pool=pool))
    model = known_spec("m", LLAMA, 60.0, 1.0, tp)
    cluster = h100s(gpus, load={"mode": mode}, **sections)
    return simulate(SimSpec(cluster, (model,), settings, lambda: [TraceRow(0.0, "m", 10, 1)])).stats.activation_s[0]


def test_activation_follows_from_link_rates() -> None:
    weights_s = known_spec("m", LLAMA, 1.0, 1.0).weight_bytes / (64e9 * 0.85)
    quick = {"timing": {"relayout": "0.1s"}}  # so that loading takes longer
    assert activation_s("single", **quick) == pytest.approx(weights_s + 0.1, rel=0.01)
    assert activation_s("naive") == pytest.approx(4 * weights_s + 0.1, rel=0.01)
    assert activation_s("parallel") == pytest.approx(0.7, rel=0.01)  # weights in 37 ms: the relayout is what remains
    assert activation_s("single", tp=4) == pytest.approx(0.7, rel=0.01)
    assert activation_s("single", pool=False) == pytest.approx(20.7, rel=0.01)


def test_weights_on_another_node_come_over_the_network_once() -> None:
    models = (known_spec("a", LLAMA, 60.0, 1.0), known_spec("b", LLAMA, 60.0, 1.0))
    cluster = h100s(1, nodes=2, memory="20GiB", load={"source": "spread"}, network={"nic_gbit": 80, "efficiency": 1.0})
    rows = [TraceRow(60.0 * i, "ab"[i % 2], 10, 5) for i in range(6)]
    result, _ = run(cluster, models, rows)
    assert all(not r.error for r in result.world.recorder.records)
    network_s = models[0].weight_bytes / 10e9
    slow = [s for s in result.stats.activation_s if s > 1.0]
    assert slow == pytest.approx([network_s + network_s * 10 / (16 * 54.4) + 0.1] * len(slow), rel=0.01)


@pytest.mark.parametrize(("share", "loaded"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_a_run_may_begin_with_all_models_that_fit(share: float, loaded: int) -> None:
    models = tuple(known_spec(f"m{i}", LLAMA, 5.0, 1.0) for i in range(6))  # 16 GB each; least KV beside them
    rows = [TraceRow(1.0 + i, "m0", 10, 5) for i in range(3)]
    rows += [TraceRow(5.0, f"m{i}", 10, 5) for i in range(1, 6)]
    _, log = run(h100s(1), models, rows, preload_share=share)
    early = [line for line in log if float(str(line["at_s"])) < 30.0 and line["do"] in ("Activate", "Deactivate")]
    assert [line["model"] for line in early] == [f"m{i}" for i in range(loaded)]
    assert all(line["do"] == "Activate" for line in early), "nobody is driven out for another"


def test_same_seed_same_decisions_whatever_the_log_goes_to() -> None:
    models = llamas(4)
    rows = random_rows([m.name for m in models], 5, 150, 60.0)
    digests = {run(h100s(2), models, rows)[0].stats.decision_digest for _ in range(2)}
    assert len(digests) == 1


def test_shared_prefixes_are_computed_once() -> None:
    models = (known_spec("m", LLAMA, 5.0, 1.0),)
    blocks = tuple(range(16))
    rows = [TraceRow(2.0 * i, "m", 8192, 10, None, blocks) for i in range(5)]
    result, _ = run(h100s(1), models, rows)
    times = sorted((r.row, r.ttft_s) for r in result.world.recorder.records)
    assert times[4][1] is not None
    assert times[1][1] is not None
    assert times[4][1] < 0.2 * times[0][1]  # type: ignore[operator]
    (engine,) = result.world.devices[DeviceId("node0/cuda:0")].engines.values()
    assert engine.kv.cache.hit_tokens == 4 * 8191
    assert engine.kv.cache.idle_tokens == 8192


def test_too_large_for_the_device_ends_with_an_error_and_others_go_on() -> None:
    models = (replace(tiny_spec("m0"), context_tokens=10**9),)
    rows = [TraceRow(0.0, "m0", 300_000, 5), TraceRow(1.0, "m0", 100, 5)]
    result, _ = run(h100s(1, memory="1GiB"), models, rows, "muxserve")
    errors = {r.row: r.error for r in result.world.recorder.records}
    assert errors == {0: "too_large", 1: ""}


def test_unknown_model_in_the_trace_is_named() -> None:
    with pytest.raises(InvalidValue, match="row 0 of the trace is for an unknown model"):
        run(h100s(1), llamas(2), [TraceRow(0.0, "nobody", 1, 1)])


def test_objectives_come_from_a_dedicated_gpu() -> None:
    models = llamas(2)
    rows = random_rows([m.name for m in models], 2, 60, 60.0)
    base = dedicated_objectives(models, rows, h100s(2))
    scaled = with_objectives(models, base, 5.0, 2.0)
    assert scaled[0].slo_ttft_s == pytest.approx(5 * base["m0"][0])
    assert 0.005 < base["m0"][1] < 0.05


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    models = [f"model-{i}" for i in range(8)]
    write_trace(tmp_path / "t.parquet", random_rows(models, 1, 120, 60.0), TraceInfo())
    return Inputs(tmp_path / "t.parquet", EXAMPLES / "cluster-2xh100.yaml", EXAMPLES / "catalog-8.yaml")


def test_sweep_covers_every_combination(inputs: Inputs) -> None:
    axes = Axes(policies=("prism", "static"), gpus=(2, 4), rates=(1.0, 2.0))
    assert len(list(variants(inputs, axes))) == 8
    points = sweep_points(inputs, Axes(policies=("prism", "static"), gpus=(2,)), processes=1)
    assert [(p.policy, p.gpus, p.requests) for p in points] == [("prism", 2, 120), ("static", 2, 120)]


def _fake(inputs: Inputs, attained: float) -> Point:
    gpus = inputs.gpus or 0
    return Point("prism", gpus, 1.0, 1.0, 1, attained, attained, attained, 0, None, None, None, 0, 0, 0.0, 0.0)


@pytest.mark.parametrize("need", [1, 2, 3, 7, 16, 21, 64])
def test_capacity_is_the_fewest(inputs: Inputs, need: int) -> None:
    found = fewest_gpus(inputs, 0.99, "ttft", 64, lambda i: _fake(i, 1.0 if (i.gpus or 0) >= need else 0.5))
    assert found.gpus == need
    assert fewest_gpus(inputs, 0.99, "ttft", need, lambda i: _fake(i, 0.5)).gpus is None


def test_resized_keeps_the_kind() -> None:
    cluster = resized(load_cluster(EXAMPLES / "cluster-32xh100.yaml"), 20)
    assert cluster.gpus == 20
    assert [(g.gpu, g.nodes, g.gpus_per_node) for g in cluster.groups] == [("H100", 2, 8), ("H100", 1, 4)]


def test_device_schedulers_begin_with_the_declared_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[EngineUp] = []
    tell = SimDevice.tell

    def listening(device: SimDevice, event: GpuEvent) -> None:
        begun.extend([event] if isinstance(event, EngineUp) else [])
        tell(device, event)

    monkeypatch.setattr(SimDevice, "tell", listening)
    spec, rows = tiny_spec("a"), [TraceRow(1.0, "a", 16, 4)]
    for group in ({}, {"pace": {"layer": "5ms", "decode_sequence": "1ms"}}):
        run(parse_cluster({"groups": [{"gpu": "cpu", **group}]}, "test"), (spec,), rows)
    guessed, declared = (event.rates for event in begun)
    assert guessed is None
    assert declared == step_rates(spec, DeviceKind.HOST, DevicePace(layer_s=0.005, decode_sequence_s=0.001))
