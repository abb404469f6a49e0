"""Chains that the controller planned, carried out by weight servers over real links: sharded, gathered, leaf by leaf.

Nothing here asserts a speed: who sent what to whom, and that every byte is right.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import msgspec
import pytest

from prism.controller.distribution import WeightDistribution
from prism.controller.images import ModelImages
from prism.controller.nodes import FleetNodes
from prism.core.effects import Activate
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.specs import DeviceKind
from prism.policy.multicast.topology import NetworkTopology
from prism.transfer.session import NodePlan
from prism.weights.packs.format import PackKey
from prism.wire.messages import AgentReport
from prism.wire.reports import DeviceStatus, LinkReport, PackReport
from tests.net.cluster import Cluster

pytestmark = pytest.mark.net
NBYTES, LINK_BYTES_S = 24 << 20, 50e6
M = ModelName("m")
DOMAINS = NetworkTopology(domains={"n0": "A", "n1": "A", "n2": "B", "n3": "B"}, domain_bytes_s={"A": 4e8, "B": 4e8})
LEAVES = NetworkTopology(
    leaves={"n0": "X", "n1": "X", "n2": "X", "n3": "Y", "n4": "Y"},
    uplink_bytes_s={"X": LINK_BYTES_S, "Y": LINK_BYTES_S},
)


def ordered(cluster: Cluster, sources: int, nbytes: int, topology: NetworkTopology) -> tuple[dict[str, NodePlan], str]:
    """What the controller sends the machines when instances are to come on all that lack the model, as pairs; and the
    path that it says the weights take."""
    nodes = FleetNodes()
    orders = []
    for number, (name, address) in enumerate(cluster.addresses.items()):
        pack = PackReport(model=M, layout=PackKey(M).layout, nbytes=nbytes, in_memory=True)
        device = DeviceStatus(id=f"{name}/host:0", kind="host", domain="", capacity_bytes=1 << 30, free_bytes=1 << 30)
        links = [LinkReport(source=n, bytes_s=LINK_BYTES_S, age_s=1.0) for n in cluster.addresses if n != name]
        said = AgentReport(node=name, incarnation="one", mailbox=name, devices=[device], instances=[], weights=address)
        held = [pack] if number < sources else []
        nodes.report(msgspec.structs.replace(said, packs=held, links=links), 0.0)
        if number >= sources:
            where = whole_model([DeviceId(f"{name}/host:0")])
            key = InstanceKey(M, Generation(number))
            orders.append(Activate(key, where, because(ReasonCode.OPERATOR), live=LiveMode.PAIR))
    distribution = WeightDistribution(nodes, topology)
    supplies, sends = distribution.supply(orders, {M: ModelImages(M, {DeviceKind.HOST: (PackKey(M),)})}, 0.0)
    raw = [p for by_node in supplies.values() for supply in by_node.values() for p in supply.plans]
    raw += [message.part for _, message in sends]
    parts = {part.node: part for part in (msgspec.msgpack.decode(r, type=NodePlan) for r in raw)}
    (sent,) = distribution.running()
    return parts, str(dict(sent.reason.numbers)["path"])


def assert_whole(answers: dict[str, dict[str, Any]], made: dict[str, Any]) -> None:
    for name, answer in answers.items():
        assert answer.get("digest") == made["digest"], (name, answer)
        assert sum(nbytes for nbytes, _ in answer["by_source"].values()) <= made["nbytes"], "a byte came twice"


@pytest.mark.parametrize("cluster", [{"count": 5}], indirect=True)
@pytest.mark.parametrize("victim", ["", "n1", "n3"])
def test_a_sharded_link_and_a_gather_deliver_every_byte(cluster: Cluster, victim: str) -> None:
    """Also when the sender of one shard, or its receiver, dies on the way: the rest comes from whoever has it."""
    made = cluster.make(M, NBYTES, sources=2)
    parts, path = ordered(cluster, 2, made["nbytes"], DOMAINS)
    assert path == "n0+n1 > n2+n3 > n4"

    def kill(start_s: float) -> None:
        if victim:
            cluster.nodes[victim].process.send_signal(signal.SIGKILL)

    answers = cluster.carry_out(parts, during=kill, skip=frozenset({victim}))
    assert set(answers) == {"n2", "n3", "n4"} - {victim}
    assert_whole(answers, made)
    if not victim:
        for node, beside in (("n2", "n3"), ("n3", "n2")):
            assert answers[node]["by_source"].get(beside, (0, 0.0))[0] > 0, "what its neighbour got came from there"


@pytest.mark.parametrize("cluster", [{"count": 5}], indirect=True)
def test_a_leaf_switch_is_entered_once(cluster: Cluster) -> None:
    """By the plan; who was late may have asked somebody else for a block, which is no fault."""
    made = cluster.make(M, NBYTES)
    parts, path = ordered(cluster, 1, made["nbytes"], LEAVES)
    chain = path.split(" > ")
    assert chain[0] == "n0" and set(chain[1:3]) == {"n1", "n2"} and set(chain[3:]) == {"n3", "n4"}
    assert_whole(cluster.carry_out(parts), made)


MBIT = 40.0
"""Half of the model takes a good 0.8 s over a link: its rate is changed long before that, however busy the machine."""


@pytest.mark.parametrize("cluster", [{"count": 5, "mbit": MBIT}], indirect=True)
@pytest.mark.parametrize("slow", ["n1", "n2", "n3"])
def test_those_behind_a_link_that_becomes_slow_are_completed_by_others(cluster: Cluster, slow: str) -> None:
    """In mid-multicast a link falls to a twentieth, both ways: that of the sender of a shard, or of a receiver that
    passes on what it gets. What is behind it comes from others, and the slow one has all in the end."""
    made = cluster.make(M, NBYTES // 3, sources=2)
    parts, path = ordered(cluster, 2, made["nbytes"], DOMAINS)
    assert path == "n0+n1 > n2+n3 > n4"

    def slow_down(start_s: float) -> None:
        time.sleep(max(0.0, start_s + 0.3 - time.monotonic()))
        cluster.hosts.set_rate(int(slow[1:]), MBIT / 20)

    answers = cluster.carry_out(parts, during=slow_down)
    assert set(answers) == {"n2", "n3", "n4"}
    assert_whole(answers, made)
    behind = {n: p for n, part in parts.items() if (p := sum(source == slow for source, _ in part.receives))}
    assert behind, "somebody was to get something over it"
    for node, pieces in behind.items():
        came = answers[node]["by_source"].get(slow, (0, 0.0))[0]
        assert came < made["nbytes"] * pieces / parts[node].pieces, "all that was planned came over the slow link"
