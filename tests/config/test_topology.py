"""What a catalog says of switches and fast domains, as planners read it; and what it may not say."""

from __future__ import annotations

import pytest

from prism.config.errors import CatalogError
from prism.config.load import load_text
from prism.policy.multicast.topology import NetworkTopology

MODELS = "models: [{name: m, path: p}]\n"


def topology_of(text: str) -> NetworkTopology:
    return load_text((MODELS + text).encode(), "c.yaml", {}).topology.known()


def test_switches_and_domains_reach_the_planner() -> None:
    found = topology_of(
        "topology: {leaves: [{nodes: [a, b], uplink: 5GB}, {nodes: [c]}], domains: [{nodes: [b, c], link: 40GB}]}\n"
    )
    assert found.leaves == {"a": "leaf 0", "b": "leaf 0", "c": "leaf 1"}
    assert found.uplink_bytes_s == {"leaf 0": 5e9}, "the other one carries what it can"
    assert found.near("b") == {"c"} and found.near("a") == frozenset()
    assert found.domain_bytes_s == {"domain 0": 4e10}
    assert topology_of("") == NetworkTopology()


@pytest.mark.parametrize("kind", ["leaves", "domains"])
def test_a_machine_is_in_one_place_only(kind: str) -> None:
    with pytest.raises(CatalogError, match="is listed twice"):
        topology_of(f"topology: {{{kind}: [{{nodes: [a, b]}}, {{nodes: [b]}}]}}\n")
