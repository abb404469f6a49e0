"""The controller's multicasts where it knows more than rates: switches, fast domains, who is sending already."""

from __future__ import annotations

import msgspec
import pytest

from prism.controller.distribution import WeightDistribution
from prism.controller.images import ModelImages
from prism.controller.nodes import FleetNodes
from prism.core.effects import Activate
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.specs import DeviceKind
from prism.core.views import InstanceState
from prism.policy.multicast.topology import NetworkTopology
from prism.transfer.session import NodePlan
from prism.weights.packs.format import PackKey
from prism.wire.messages import AgentReport
from prism.wire.reports import DeviceStatus, InstanceReport, LinkReport, PackReport, RemoteReport

PACK = PackKey("weights of m")
M = ModelName("m")
IMAGES = {M: ModelImages("weights of m", {DeviceKind.HOST: (PACK,)}, layers=12)}
RATE = 1e9
FIRST = [(0.0, 0.05), (0.05, 0.1), (0.95, 1.0)]


def report(node: str, holds: bool, **more: object) -> AgentReport:
    pack = PackReport(
        model=PACK.model, layout=PACK.layout, nbytes=1 << 30, in_memory=True, first=FIRST, ends=more.pop("ends", [])
    )
    device = DeviceStatus(id=f"{node}/host:0", kind="host", domain="", capacity_bytes=1 << 30, free_bytes=1 << 30)
    fixed = {"incarnation": "one", "mailbox": node, "devices": [device], "weights": f"{node}:2"}
    values = {"instances": [], "packs": [pack] if holds else [], **more}
    return AgentReport(node=node, **fixed, **values)  # type: ignore[arg-type]


def link(source: str, bytes_s: float) -> LinkReport:
    return LinkReport(source=source, bytes_s=bytes_s, age_s=1.0)


class Fleet:
    """Machines called by letters, of which ``sources`` have the model."""

    def __init__(self, names: str, sources: str, topology: NetworkTopology, **reports: AgentReport) -> None:
        nodes = FleetNodes()
        for name in names:
            nodes.report(reports.get(name) or report(name, name in sources), 0.0)
        self.distribution = WeightDistribution(nodes, topology)
        self.generation = 0

    def load(self, receivers: str, live: LiveMode = LiveMode.PAIR) -> dict[str, NodePlan]:
        """The parts of all that send or receive."""
        orders = []
        for name in receivers:
            self.generation += 1
            key, device = InstanceKey(M, Generation(self.generation)), DeviceId(f"{name}/host:0")
            orders.append(Activate(key, whole_model([device]), because(ReasonCode.OPERATOR), live=live))
        supplies, sends = self.distribution.supply(orders, IMAGES, 0.0)
        self.leads = {node for by in supplies.values() for node, supply in by.items() if supply.company.leads}
        raw = [p for by_node in supplies.values() for supply in by_node.values() for p in supply.plans]
        raw += [message.part for _, message in sends]
        return {part.node: part for part in (msgspec.msgpack.decode(r, type=NodePlan) for r in raw)}

    @property
    def reason(self) -> dict[str, object]:
        return dict(self.distribution.running()[-1].reason.as_dict())


def links_used(parts: dict[str, NodePlan]) -> set[tuple[str, str]]:
    return {(node, to) for node, part in parts.items() for to, _ in part.sends}


def leaves(*switches: str, uplink: float = RATE) -> NetworkTopology:
    by_node = {node: switch for switch in switches for node in switch}
    return NetworkTopology(leaves=by_node, uplink_bytes_s=dict.fromkeys(switches, uplink))


def measured(names: str) -> dict[str, AgentReport]:
    """Everybody got something at the same rate."""
    return {n: report(n, n == "a", links=[link(s, RATE) for s in names if s != n]) for n in names}


def test_a_leaf_switch_is_left_once() -> None:
    fleet = Fleet("abcdefgh", "a", leaves("abcd", "efgh"), **measured("abcdefgh"))
    parts = fleet.load("bcdefgh")
    crossed = {(s, d) for s, d in links_used(parts) if (s in "abcd") != (d in "abcd")}
    assert len(crossed) == 1
    assert fleet.reason["way"] == "chain" and fleet.reason["code"] == "multicast"
    path = str(fleet.reason["path"]).split(" > ")
    assert path[0] == "a" and set(path[1:4]) == set("bcd") and set(path[4:]) == set("efgh")
    assert float(str(fleet.reason["expected_s"])) < float(str(fleet.reason["binomial_s"]))


def test_operators_see_the_path_and_what_other_ways_would_take() -> None:
    fleet = Fleet("abcd", "a", leaves("ab", "cd"))
    fleet.load("bcd")
    shown = fleet.distribution.running()[-1].as_decision().as_dict()
    assert (shown["model"], shown["action"], shown["current"]) == ("m", "send", ["a"])
    assert set(shown["target"]) == set("bcd")  # type: ignore[call-overload]
    assert {"code", "way", "path", "blocks", "expected_s"} < set(fleet.reason)
    assert fleet.reason.keys() & {"binomial_s", "chain_s"}, "what the other one would have taken"


def test_links_between_groups_of_machines_are_sharded_and_gathered() -> None:
    domains = NetworkTopology(domains={n: d for d in ("ab", "cd") for n in d}, domain_bytes_s={"ab": 1e11, "cd": 1e11})
    fleet = Fleet("abcde", "ab", domains)
    parts = fleet.load("cde")
    assert fleet.reason["path"] == "a+b > c+d > e"
    assert {("a", "c"), ("b", "d"), ("c", "d"), ("d", "c")} < links_used(parts)
    assert parts["c"].near == ("d",) and parts["d"].near == ("c",) and parts["e"].near == ()
    for node, beside in (("c", "d"), ("d", "c")):
        gathered = sum(source == beside for source, _ in parts[node].receives)
        assert gathered * 2 == parts[node].pieces, "half of it comes over its own link"


def test_a_source_that_runs_layers_for_another_machine_is_not_disturbed() -> None:
    key, where = InstanceKey(M, Generation(99)), whole_model([DeviceId("a/host:0")])
    remote = RemoteReport(layers=12, held_layers=12, leaders=["z/host:0"])
    leads = InstanceReport(key=key, parts=where, state=InstanceState.READY, remote=remote)
    fleet = Fleet("abcd", "ab", NetworkTopology(), a=report("a", True, instances=[leads]))
    parts = fleet.load("cd")
    assert set(parts) == {"b", "c", "d"} and fleet.reason["sending"] == "a"
    here = RemoteReport(layers=12, held_layers=12, leaders=["a/host:1"])
    beside = msgspec.structs.replace(leads, remote=here)
    undisturbed = Fleet("abcd", "ab", NetworkTopology(), a=report("a", True, instances=[beside]))
    assert {"a", "b"} <= set(undisturbed.load("cd")), "what runs for its own machine leaves the link free"
    alone = Fleet("acd", "a", NetworkTopology(), a=report("a", True, instances=[leads]))
    assert "a" in alone.load("cd") and "sending" not in alone.reason


def test_what_sends_one_model_is_no_source_of_another_one_while_it_does() -> None:
    fleet = Fleet("abcd", "ab", NetworkTopology())
    assert set(fleet.load("c")) == {"a", "c"}
    other = PackKey("other weights")
    pack = PackReport(model=other.model, layout=other.layout, nbytes=1 << 30, in_memory=True)
    for name in "ab":
        fleet.distribution._nodes.report(msgspec.structs.replace(report(name, True), packs=[pack]), 0.0)
    order = Activate(
        InstanceKey(ModelName("n"), Generation(7)), whole_model([DeviceId("d/host:0")]), because(ReasonCode.OPERATOR)
    )
    images = {ModelName("n"): ModelImages(other.model, {DeviceKind.HOST: (other,)})}
    supplies, _ = fleet.distribution.supply([order], images, 0.0)
    (raw,) = supplies[order.key][NodeId("d")].plans
    assert msgspec.msgpack.decode(raw, type=NodePlan).sources == ("b",)


def test_a_slow_link_stands_last_in_its_leaf_and_passes_nothing_on() -> None:
    reports = measured("abcdef")
    for name, one in reports.items():
        slow = [link(to.source, RATE / 20 if "c" in (name, to.source) else RATE) for to in one.links]
        reports[name] = msgspec.structs.replace(one, links=slow)
    fleet = Fleet("abcdef", "a", leaves("abc", "def"), **reports)
    parts = fleet.load("bcdef")
    assert parts["c"].sends == ()
    assert {n for n in "bdef" if len(parts[n].receives) == parts[n].pieces} == set("bdef")


def test_an_uplink_that_nobody_declared_is_known_from_what_crossed_it() -> None:
    names = "abcdef"
    reports = {
        n: report(
            n, n == "a", links=[link(s, RATE if (s in "abc") == (n in "abc") else RATE / 4) for s in names if s != n]
        )
        for n in names
    }
    fleet = Fleet(
        names, "a", NetworkTopology(leaves={n: switch for switch in ("abc", "def") for n in switch}), **reports
    )
    crossed = {(s, d) for s, d in links_used(fleet.load("bcdef")) if (s in "abc") != (d in "abc")}
    assert len(crossed) == 1


def test_pairs_get_their_layers_in_order_from_every_source() -> None:
    """What comes from the middle first is of no use to one whose peer runs the layers before it."""
    fleet = Fleet("abcdef", "ad", leaves("abc", "def", uplink=RATE / 10))
    for node, part in fleet.load("bcef").items():
        rest = [piece for _, piece in part.receives if piece not in part.first]
        assert node in "ad" or rest == sorted(rest)


def test_who_forms_pipelines_on_a_chain_begins_with_a_layer_of_its_own() -> None:
    """Two leaves with a source each: two chains, whose t-th members are together."""
    fleet = Fleet("abcdef", "ad", leaves("abc", "def", uplink=RATE / 10))
    parts = fleet.load("bcef", LiveMode.PIPELINES)
    assert fleet.reason["way"] == "chain"
    assert links_used(parts) == {("a", "b"), ("b", "c"), ("d", "e"), ("e", "f")}
    first = set(parts["b"].first)
    begins = {node: next(piece for _, piece in parts[node].receives if piece not in first) for node in "bcef"}
    assert begins["b"] == begins["c"] and begins["e"] == begins["f"] and begins["b"] != begins["e"]


@pytest.mark.parametrize("live", [LiveMode.PIPELINES, LiveMode.PAIR, LiveMode.WHOLE])
def test_embedding_and_head_come_at_once_to_one_of_each_pipeline(live: LiveMode) -> None:
    """The others are told that they lead later. In pairs everybody leads."""
    ends = [FIRST[0], FIRST[2]]
    holders = {name: report(name, True, ends=ends) for name in "ad"}
    fleet = Fleet("abcdef", "ad", NetworkTopology(), **holders)
    parts = fleet.load("bcef", live)
    first = {name: set(parts[name].first) for name in "bcef"}
    some = set.union(*first.values())
    early = {n for n in "bcef" if {p for _, p in parts[n].receives[: len(some) + 3]} >= some}
    if live is LiveMode.PIPELINES:
        assert early == fleet.leads == {name for name in "bcef" if first[name] == some} and len(early) == 2
        assert all(first[name] and not first[name] & {0, parts[name].pieces - 1} for name in {*"bcef"} - early)
    else:
        assert early == fleet.leads == {*"bcef"} and all(each == some for each in first.values())
