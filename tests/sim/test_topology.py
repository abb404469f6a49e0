"""Which links a transfer crosses: NVLink domains, leaves and spine, directions, storage."""

from __future__ import annotations

import pytest

from prism.core.ids import DeviceId, NodeId
from prism.core.settings import PolicySettings
from prism.sim.cluster_file import parse_cluster
from prism.sim.recorder import RunRecorder
from prism.sim.world import World
from tests.sim.helpers import tiny_spec

NIC = 10e9
NETWORK = {"nic_gbit": 80, "efficiency": 1.0, "nodes_per_leaf": 2}


def world(group: dict[str, object], **sections: object) -> World:
    cluster = parse_cluster({"groups": [{"gpu": "H100", **group}], **sections}, "test")
    return World(cluster, [tiny_spec("m")], PolicySettings(), RunRecorder(0.0))


def rates(made: World, *pairs: tuple[int, int]) -> list[float]:
    """Bytes per second of transfers between the memories of nodes, all at once."""
    topology = made.topology
    paths = [topology.network_path(NodeId(f"node{a}"), NodeId(f"node{b}")) for a, b in pairs]
    flows = [made.roads.network.start(dict.fromkeys(path, 1.0), 1e12, lambda: None) for path in paths]
    return [flow.rate for flow in flows]


def test_both_directions_of_a_nic_are_full_and_one_direction_is_shared() -> None:
    group = {"nodes": 3, "gpus_per_node": 1}
    assert rates(world(group, network=NETWORK), (0, 1), (1, 0)) == [NIC, NIC]
    assert rates(world(group, network=NETWORK), (0, 1), (0, 2)) == pytest.approx([NIC / 2] * 2)
    assert rates(world(group, network=NETWORK), (0, 2), (1, 2)) == pytest.approx([NIC / 2] * 2)


def test_an_oversubscribed_leaf_limits_what_leaves_it_and_nothing_else() -> None:
    group = {"nodes": 4, "gpus_per_node": 1}  # node0, node1 under one leaf, node2, node3 under the other
    full, thin = {**NETWORK, "oversubscription": 1}, {**NETWORK, "oversubscription": 4}
    assert rates(world(group, network=full), (0, 2), (1, 3)) == [NIC, NIC]
    assert rates(world(group, network=thin), (0, 2), (1, 3)) == pytest.approx([NIC / 4] * 2)  # an uplink of half a NIC
    assert rates(world(group, network=thin), (0, 2), (2, 0)) == pytest.approx([NIC / 2] * 2)  # up is not down
    assert rates(world(group, network=thin), (0, 1), (2, 3)) == [NIC, NIC]


def test_only_the_gpus_of_a_domain_help_to_load() -> None:
    def helpers(group: dict[str, object]) -> list[str]:
        return world({"gpus_per_node": 4, "nodes": 2, **group}).topology.helpers(DeviceId("node1/cuda:2"))  # type: ignore[return-value]

    assert sorted(helpers({})) == [f"node1/cuda:{i}" for i in range(4)]
    assert sorted(helpers({"domain_gpus": 2})) == ["node1/cuda:2", "node1/cuda:3"]
    assert world({"gpu": "cpu", "gpus_per_node": 2}).topology.helpers(DeviceId("node0/host:1")) == ["node0/host:1"]


def test_weights_are_in_memory_on_another_node_or_in_storage() -> None:
    made = world({"nodes": 3, "gpus_per_node": 1}, load={"source": "spread"}, network=NETWORK)
    spec, nodes = tiny_spec("m"), [NodeId(f"node{i}") for i in range(3)]
    home = made.host_cache.holders(spec.name)[0]
    assert home is not None
    away = next(node for node in nodes if node != home)
    assert made.roads.source_path(home, spec.name, (1.0,), 0) == ()
    assert made.roads.source_path(away, spec.name, (1.0,), 0) == made.topology.network_path(home, away)
    made.host_cache.remove_node(home)
    assert made.roads.source_path(away, spec.name, (1.0,), 0) == (made.topology.nodes[away].ssd,)
    everywhere = world({"nodes": 2, "gpus_per_node": 1})
    assert everywhere.roads.source_path(nodes[1], spec.name, (1.0,), 0) == ()


def test_who_sends_something_already_passes_nothing_on_while_another_can() -> None:
    made = world({"nodes": 5, "gpus_per_node": 1}, load={"source": "spread"}, network=NETWORK)
    name, topology = tiny_spec("m").name, made.topology
    home = made.host_cache.holders(name)[0]
    first, second, third, fourth = (node for node in topology.nodes if node != home)

    def sends(source: NodeId, to: NodeId) -> None:
        path = made.roads.source_path(to, name, (1.0,), 0)
        assert path == topology.network_path(source, to)
        made.roads.network.start(dict.fromkeys(path, 1.0), 1e12, lambda: None)

    other_traffic = topology.network_path(second, home)
    sends(home, first)
    made.roads.network.start(dict.fromkeys(other_traffic, 1.0), 1e12, lambda: None)
    sends(first, second)
    sends(second, third)  # everybody sends: the last one takes it on
    sends(third, fourth)


def test_a_part_that_came_for_an_instance_is_there_for_the_next_one() -> None:
    made = world({"nodes": 2, "gpus_per_node": 1}, load={"source": "spread"}, network=NETWORK)
    spec, roads, parts = tiny_spec("m"), made.roads, (0.25, 0.75)
    home = made.host_cache.holders(spec.name)[0]
    away = next(node for node in made.topology.nodes if node != home)
    assert roads.source_path(away, spec.name, parts, 0)
    roads.arrived(away, spec, parts, 0)
    assert roads.arriving_parts(away, spec.name, 0) == parts and not roads.source_path(away, spec.name, parts, 0)
    assert roads.source_path(away, spec.name, parts, 1)
    roads.arrived(away, spec, parts, 1)
    assert made.host_cache.has(away, spec.name) and not roads.arriving_parts(away, spec.name, 0)
