"""``cluster.yaml``: the examples are valid, and every mistake is named with file, line, key, value and choices."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from prism.config.errors import CatalogError
from prism.core.errors import InvalidValue
from prism.sim.cluster_file import load_cluster, parse_cluster
from prism.sim.cluster_sections import Cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "sim"
GROUP = {"gpu": "H100", "nodes": 2, "gpus_per_node": 2}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("cluster-*.yaml")), ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    assert load_cluster(path).gpus > 0


def mistakes(data: object) -> list[InvalidValue]:
    with pytest.raises(CatalogError) as found:
        parse_cluster(data, "file")
    return list(found.value.problems)


@pytest.mark.parametrize(
    ("data", "key", "value", "part"),
    [
        ({"groups": [{"gpus": 1}]}, "groups[0].gpus", "gpus", "gpus_per_node"),
        ({"groups": [{"gpu": "H1000"}]}, "groups[0].gpu", "H1000", "H800"),
        ({"groups": []}, "groups", [], "at least 1"),
        ({"groups": [{"nodes": 0}]}, "groups[0].nodes", 0, "at least 1"),
        ({"groups": [{"domain_gpus": 0}]}, "groups[0].domain_gpus", 0, "at least 1"),
        ({"groups": [{"memory": "much"}]}, "groups[0].memory", "much", "64MiB"),
        ({"network": {"nic_gbit": 0}}, "network.nic_gbit", 0, "more than 0"),
        ({"network": {"efficiency": 1.5}}, "network.efficiency", 1.5, "at most 1"),
        ({"timing": {"front": "3"}}, "timing.front", "3", "500ms"),
        ({"load": {"mode": "fast"}}, "load.mode", "fast", "parallel"),
        ({"faults": [{"at": "1s", "kind": "x"}]}, "faults[0].kind", "x", "gpu_fails"),
        ({"faults": [{"kind": "node_added"}]}, "faults[0].at", None, "missing"),
        ([1], "cluster", [1], "mapping"),
    ],
)
def test_mistakes_are_named(data: object, key: str, value: object, part: str) -> None:
    [found] = mistakes(data)
    assert (found.key, found.value, found.where) == (key, value, "file")
    assert part in str(found)


@pytest.mark.parametrize(
    ("faults", "key", "part"),
    [
        ([{"kind": "gpu_fails", "target": "node0/cuda:9"}], "faults[0].target", "node1/cuda:1"),
        ([{"kind": "gpu_fails"}], "faults[0].target", "node0/cuda:0"),
        ([{"kind": "node_fails", "target": "node7"}], "faults[0].target", "node0, node1"),
        ([{"kind": "gpu_added", "target": "x"}], "faults[0].target", "node0"),
        ([{"kind": "node_added", "target": "A100"}], "faults[0].target", "H100"),
        ([{"kind": "straggler", "target": "node0/cuda:0"}], "faults[0].speed", "required"),
        ([{"kind": "gpu_drained", "target": "node0/cuda:0", "speed": 0.5}], "faults[0].speed", "means nothing"),
        ([{"kind": "engine_dies", "target": "node0/cuda:0"}], "faults[0].target", "a device and a model"),
        ([{"kind": "node_fails", "target": "node1"}] * 2, "faults[1].target", "no such node is up then"),
        ([{"kind": "gpu_fails", "target": "node1/cuda:0"}] * 2, "faults[1].target", "no such device is up then"),
    ],
)
def test_faults_without_a_target_are_found_before_the_run(faults: list[dict[str, object]], key: str, part: str) -> None:
    [found] = mistakes({"groups": [GROUP], "faults": [{"at": f"{i + 1}s", **f} for i, f in enumerate(faults)]})
    assert found.key == key
    assert part in str(found)


def test_targets_that_come_in_mid_run_are_known() -> None:
    """In order of time, not of writing."""
    faults = [
        {"at": "5s", "kind": "gpu_fails", "target": "node0/cuda:2"},
        {"at": "2s", "kind": "gpu_added", "target": "node0"},
        {"at": "9s", "kind": "node_fails", "target": "node2"},
        {"at": "3s", "kind": "node_added", "target": "H100"},
    ]
    assert len(parse_cluster({"groups": [GROUP], "faults": faults}, "file").faults) == 4


def test_a_file_names_the_lines_of_all_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("groups:\n  - {gpu: H100, gpu_count: 2}\nnetwork:\n  nic_gbit: -1\n")
    with pytest.raises(CatalogError) as found:
        load_cluster(path)
    assert [problem.where for problem in found.value.problems] == [f"{path}:2", f"{path}:4"]
    path.write_text("groups: [")
    with pytest.raises(CatalogError, match=r"cluster\.yaml:1: cluster: is not valid YAML"):
        load_cluster(path)
    with pytest.raises(CatalogError, match="cluster: cannot be read"):
        load_cluster(tmp_path / "none.yaml")


def test_errors_cross_processes() -> None:
    """As pickle does it: by what they were made of."""
    [mistake] = mistakes({"load": {"mode": "fast"}})
    again = copy.copy(CatalogError([mistake]))
    assert (str(again), again.problems[0].choices) == (str(mistake), mistake.choices)
    assert str(copy.copy(mistake)) == str(mistake)


def test_defaults_are_a_cluster() -> None:
    assert parse_cluster({}, "file") == Cluster()
