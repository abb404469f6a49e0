"""Failures, stragglers, devices that come and go in mid-run: nothing is lost, times count from the trace's start, and
transfers over what is gone go on elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.errors import InvalidValue
from prism.core.ids import DeviceId, NodeId
from prism.core.settings import PolicySettings
from prism.sim.cluster_file import parse_cluster
from prism.sim.cluster_sections import Cluster
from prism.sim.models import known_spec
from prism.sim.run import SimSpec, simulate
from prism.trace.row import TraceRow
from tests.sim.helpers import h100s, llamas, random_rows, run, tiny_spec

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"

FAULTS = [
    {"at": "8s", "kind": "straggler", "target": "node0/cuda:0", "speed": 0.2},
    {"at": "12s", "kind": "engine_dies", "target": "node0/cuda:0 m0"},
    {"at": "15s", "kind": "gpu_fails", "target": "node0/cuda:1"},
    {"at": "20s", "kind": "node_added"},
    {"at": "25s", "kind": "node_fails", "target": "node1"},
    {"at": "30s", "kind": "gpu_added", "target": "node0"},
    {"at": "35s", "kind": "gpu_drained", "target": "node0/cuda:0"},
]


@pytest.mark.parametrize("at_s", [33.0, 38.0, 41.0, 44.5, 50.0])
def test_no_request_is_lost_when_things_fail(at_s: float) -> None:
    faults = [{**fault, "at": f"{at_s / 44 * float(fault['at'][:-1]):.3f}s"} for fault in FAULTS]  # type: ignore[arg-type]
    models = llamas(4)
    rows = random_rows([m.name for m in models], int(at_s), 200, 45.0, output=400)
    result, log = run(h100s(2, nodes=2, faults=faults), models, rows)
    records = result.world.recorder.records
    assert len(records) == len(rows)
    assert not result.world.front.open
    assert not [r for r in records if r.error]
    for record in records:
        assert record.output_tokens == rows[record.row].output_tokens
    lost = [line for line in log if line["do"] == "Dispatch" and line["reason"]["code"] == "resumed"]  # type: ignore[index]
    assert lost
    assert [note.split(": ")[1].split()[0] for note in result.report.notes] == [fault["kind"] for fault in FAULTS]


def test_straggler_is_slower() -> None:
    models, rows = (tiny_spec("m0"),), [TraceRow(0.0, "m0", 100, 500)]
    slow = [{"at": "0s", "kind": "straggler", "target": "node0/cuda:0", "speed": 0.25}]
    fine = run(h100s(1), models, rows)[0].report.all.tpot_s
    bad = run(h100s(1, faults=slow), models, rows)[0].report.all.tpot_s
    assert fine is not None
    assert bad is not None
    assert bad.at(50.0) == pytest.approx(4 * fine.at(50.0), rel=1e-3)


def test_times_count_from_the_start_of_the_trace() -> None:
    """Half of a decode of many seconds is slow when the GPU slows down at half of it."""
    models, rows = (tiny_spec("m0"),), [TraceRow(0.0, "m0", 100, 4000)]
    [fine] = run(h100s(1), models, rows)[0].world.recorder.records
    assert fine.e2e_s is not None
    half_s = fine.e2e_s / 2
    slow = [{"at": f"{half_s:.6f}s", "kind": "straggler", "target": "node0/cuda:0", "speed": 0.25}]
    [late] = run(h100s(1, faults=slow), models, rows)[0].world.recorder.records
    assert late.e2e_s == pytest.approx(half_s + 4 * half_s, rel=0.02)


def test_the_engine_of_an_unknown_model_cannot_die() -> None:
    faults = [{"at": "1s", "kind": "engine_dies", "target": "node0/cuda:0 nobody"}]
    with pytest.raises(InvalidValue, match=r"faults\[0\].target: no such model .*m0"):
        run(h100s(1, faults=faults), (tiny_spec("m0"),), [TraceRow(0.0, "m0", 1, 1)])


def test_a_node_is_added_like_the_group_with_its_gpu() -> None:
    groups = [{"gpu": "A100", "gpus_per_node": 1}, {"gpu": "H200", "gpus_per_node": 2}]
    faults = [{"at": "1s", "kind": "node_added", "target": "H200"}, {"at": "2s", "kind": "node_added"}]
    cluster = parse_cluster({"groups": groups, "faults": faults}, "test")
    result, _ = run(cluster, (tiny_spec("m0"),), [TraceRow(3.0, "m0", 10, 10)])
    kinds = [device.gpu.name for device in result.world.devices.values()]
    assert kinds == ["A100", "H200", "H200", "H200", "H200", "A100"]


def _activation_s(cluster: Cluster) -> float:
    """Of the only activation that finishes, of a model that the first request asks for."""
    model = known_spec("m", LLAMA, 60.0, 1.0)
    spec = SimSpec(cluster, (model,), PolicySettings.named("prism"), lambda: [TraceRow(0.0, "m", 10, 1)])
    result = simulate(spec)
    assert not [r for r in result.world.recorder.records if r.error]
    [seconds] = result.stats.activation_s
    return seconds


def test_weights_that_come_through_a_gpu_that_fails_go_on_through_the_others() -> None:
    """Half of them came through eight PCIe links, the rest through seven: eight sevenths of the time."""
    weights_s = known_spec("m", LLAMA, 60.0, 1.0).weight_bytes / (8 * 64e9 * 0.85)

    def cluster(faults: list[dict[str, object]]) -> Cluster:
        timing = {"relayout": "0", "ready": "0", "command": "0", "front": "0"}
        group = {"gpu": "H100", "gpus_per_node": 8, "dram_gbytes_per_s": 2000}
        return parse_cluster({"groups": [group], "timing": timing, "faults": faults}, "test")

    assert _activation_s(cluster([])) == pytest.approx(weights_s, rel=0.01)
    faults: list[dict[str, object]] = [{"at": f"{weights_s / 2:.6f}s", "kind": "gpu_fails", "target": "node0/cuda:7"}]
    seconds = _activation_s(cluster(faults))
    assert seconds == pytest.approx(weights_s * (0.5 + 0.5 * 8 / 7), rel=0.01)


def test_weights_that_come_from_a_node_that_fails_come_from_storage() -> None:
    network = {"nic_gbit": 8, "efficiency": 1.0, "ssd_gbytes_per_s": 2}
    model = known_spec("m", LLAMA, 60.0, 1.0)
    size = model.weight_bytes
    cluster = {"load": {"source": "spread"}, "network": network, "memory": "30GiB", "timing": {"lease": "0.5s"}}
    spec = SimSpec(h100s(1, nodes=2, **cluster), (model,), PolicySettings.named("prism"), lambda: [])
    home = simulate(spec).world.host_cache.holders(model.name)[0]
    assert home == NodeId("node0")
    # The home's GPU is gone, so that the model must be loaded on the other node; then the home itself goes.
    faults = [
        {"at": "0s", "kind": "gpu_fails", "target": "node0/cuda:0"},
        {"at": "7s", "kind": "node_fails", "target": "node0"},
    ]
    rows = [TraceRow(2.0, "m", 10, 1)]
    result, _ = run(h100s(1, nodes=2, faults=faults, **cluster), (model,), rows)
    [record] = result.world.recorder.records
    assert not record.error
    assert result.world.devices[DeviceId("node1/cuda:0")].engines
    [seconds] = result.stats.activation_s
    assert seconds == pytest.approx(5.0 + size / 2e9, rel=0.05)  # five seconds in vain, then from the SSD


def test_replacements_have_the_settings_of_their_kind() -> None:
    """A GPU that is added belongs to its node: same kind, memory and NVLink domain."""
    cluster = h100s(1, memory="20GiB", faults=[{"at": "1s", "kind": "gpu_added", "target": "node0"}])
    result, _ = run(cluster, (replace(tiny_spec("m0"), pinned=True),), [TraceRow(2.0, "m0", 10, 10)])
    first, second = result.world.devices.values()
    assert (second.spec.memory_bytes, second.spec.domain, second.gpu) == (
        first.spec.memory_bytes,
        first.spec.domain,
        first.gpu,
    )
