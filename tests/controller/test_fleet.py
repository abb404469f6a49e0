"""The controller and several machines: who sends weights to whom, signs of death, counted links."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import msgspec

from prism.controller.admin import Admin
from prism.controller.companions import LiveCompany
from prism.controller.distribution import LINK_KNOWN_S, RUNS_S, Supplies, WeightDistribution
from prism.controller.images import ModelImages, read_images
from prism.controller.nodes import BROKEN_AFTER_S, LOST_AFTER_S, FleetNodes
from prism.controller.transfers import Transfers
from prism.core.effects import Activate
from prism.core.events import DeviceReport, NodeJoined, NodeLost, OperatorDrain
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.specs import ModelShape, ModelSpec
from prism.core.views import InstanceState
from prism.engine.images import layout_name
from prism.obs import names
from prism.obs.metrics import Metrics
from prism.transfer.session import NodePlan
from prism.wire.commands import Distribute
from prism.wire.messages import AgentReport
from prism.wire.reports import ArrivalReport, DeviceStatus, InstanceReport, LinkReport, PackReport

READY = InstanceState.READY
M, MARK = ModelName("m"), "0123abcd"
SPEC = ModelSpec(M, "/m", 1.0, 0.1, 1 << 20, ModelShape(1, 8, 1, 1, 8, 16, 10), 128)
KNOWN = {M: read_images(SPEC, MARK)}
LAYOUT = layout_name(version("sglang"), 1, 0, "auto")


def report(node: str, *, held: str = "", network: bool = True, **more: object) -> AgentReport:
    """``held``: "memory", "disk" or nothing."""
    packs = [PackReport(model=MARK, layout=LAYOUT, nbytes=1 << 20, in_memory=held == "memory")] if held else []
    device = DeviceStatus(id=f"{node}/host:0", kind="host", domain="", capacity_bytes=1000, free_bytes=600)
    return AgentReport(
        node=node,
        incarnation="one",
        mailbox=f"tcp://{node}:1",
        devices=[device],
        instances=[],
        weights=f"{node}:2" if network else "",
        packs=packs,
        **more,  # type: ignore[arg-type]
    )


def fleet(*reports: AgentReport) -> tuple[FleetNodes, WeightDistribution]:
    nodes = FleetNodes()
    for one in reports:
        nodes.report(one, 0.0)
    return nodes, WeightDistribution(nodes)


def activate(node: str, generation: int) -> Activate:
    device = DeviceId(f"{node}/host:0")
    return Activate(InstanceKey(M, Generation(generation)), whole_model([device]), because(ReasonCode.OPERATOR))


def parts(raw: tuple[bytes, ...]) -> list[NodePlan]:
    return [msgspec.msgpack.decode(part, type=NodePlan) for part in raw]


# --- weights ---


def test_one_multicast_for_all_that_lack_the_model() -> None:
    _, distribution = fleet(report("a", held="memory"), report("b"), report("c"), report("d"))
    orders = [activate(node, i) for i, node in enumerate("bcd")]
    supplies, sends = distribution.supply(orders, KNOWN, 0.0)
    plans = [parts(supplies[M, Generation(i)][NodeId(node)].plans)[0] for i, node in enumerate("bcd")]
    assert {p.session for p in plans} == {plans[0].session}
    assert [p.node for p in plans] == ["b", "c", "d"]
    assert all(p.sources == ("a",) and p.receives for p in plans)
    assert [mailbox for mailbox, _ in sends] == ["tcp://a:1"]
    assert isinstance(sends[0][1], Distribute) and parts((sends[0][1].part,))[0].node == "a"
    assert supplies[M, Generation(0)][NodeId("b")].peers == {"a": "a:2", "c": "c:2", "d": "d:2"}
    assert supplies[M, Generation(0)][NodeId("b")].mark == MARK


def test_what_is_in_memory_here_comes_from_nowhere_else() -> None:
    _, distribution = fleet(report("a", held="memory"), report("b", held="memory"))
    supplies, sends = distribution.supply([activate("b", 1)], KNOWN, 0.0)
    assert supplies[M, Generation(1)][NodeId("b")].plans == () and not sends


def test_a_pack_on_disk_gives_way_only_to_a_network_known_to_be_faster() -> None:
    def from_network(disk_bytes_s: float, link_bytes_s: float) -> bool:
        rates = {"disk_bytes_s": disk_bytes_s, "link_bytes_s": link_bytes_s}
        _, distribution = fleet(report("a", held="memory"), report("b", held="disk", **rates))
        return bool(distribution.supply([activate("b", 1)], KNOWN, 0.0)[0][M, Generation(1)][NodeId("b")].plans)

    assert not from_network(0.0, 0.0)
    assert not from_network(2e9, 1e9)
    assert not from_network(0.0, 1e9)
    assert from_network(1e9, 2e9)


def test_nobody_has_it_and_one_machine_alone() -> None:
    _, distribution = fleet(report("a"), report("b"))
    assert distribution.supply([activate("b", 1)], KNOWN, 0.0)[0][M, Generation(1)][NodeId("b")].plans == ()
    _, distribution = fleet(report("a", held="memory", network=False))
    assert distribution.supply([activate("a", 1)], KNOWN, 0.0)[0][M, Generation(1)][NodeId("a")].peers == {}


def test_memory_is_the_better_source_and_unknown_weights_are_left_alone() -> None:
    _, distribution = fleet(report("a", held="disk"), report("b", held="memory"), report("c"))
    supplies, _ = distribution.supply([activate("c", 1)], KNOWN, 0.0)
    assert parts(supplies[M, Generation(1)][NodeId("c")].plans)[0].sources == ("b",)
    supplies, _ = distribution.supply([activate("c", 2)], {M: ModelImages()}, 0.0)
    assert supplies[M, Generation(2)][NodeId("c")].plans == ()


def test_settings_that_no_engine_takes_are_the_engines_to_refuse() -> None:
    _, distribution = fleet(report("a", held="memory"), report("b"))
    wrong = {M: read_images(replace(SPEC, engine_args=(("tp_size", 2),)), MARK)}
    assert distribution.supply([activate("b", 1)], wrong, 0.0)[0][M, Generation(1)][NodeId("b")].plans == ()


def pipelined(node: str, generation: int) -> Activate:
    return replace(activate(node, generation), live=LiveMode.PIPELINES)


def company(supplies: Supplies, generation: int, node: str) -> LiveCompany:
    return supplies[M, Generation(generation)][NodeId(node)].company


def test_what_is_sent_together_in_shifted_order_is_a_pipeline_and_what_is_needed_to_lead_comes_first() -> None:
    """Two sources, four receivers: sub-groups begin with different chunks."""
    first = [(0.0, 0.1), (0.95, 1.0)]
    held = [PackReport(model=MARK, layout=LAYOUT, nbytes=1 << 20, in_memory=True, first=first)]
    sources = [msgspec.structs.replace(report(node), packs=held) for node in "ab"]
    _, distribution = fleet(*sources, *(report(node) for node in "cdef"))
    orders = [pipelined(node, i) for i, node in enumerate("cdef")]
    supplies, _ = distribution.supply(orders, KNOWN, 0.0)
    for i, node in enumerate("cdef"):
        (plan,) = parts(supplies[M, Generation(i)][NodeId(node)].plans)
        pieces = [piece for _, piece in plan.receives]
        needed = {p for p in range(plan.pieces) if p / plan.pieces < 0.1 or (p + 1) / plan.pieces > 0.95}
        assert plan.pieces >= 16
        assert needed <= set(pieces[: len(needed) + 2]), "but for the turns that nodes of a sub-group take"
    found = {i: company(supplies, i, node) for i, node in enumerate("cdef")}
    by_pipeline: dict[int, set[int]] = {}
    for i, mine in found.items():
        by_pipeline.setdefault(mine.pipeline, set()).add(i)
        assert {(c.key.generation, c.pipeline) for c in mine.companions} == {
            (j, other.pipeline) for j, other in found.items() if j != i
        }
    assert sorted(map(len, by_pipeline.values())) == [2, 2]
    assert all({found[i].turn for i in members} == {0, 1} for members in by_pipeline.values())


def test_machines_that_load_from_their_own_memory_are_one_pipeline_in_shifted_order() -> None:
    serving = InstanceReport(key=InstanceKey(M, Generation(9)), parts=whole_model([DeviceId("a/host:0")]), state=READY)
    here = [report(node, held="memory") for node in "bcd"]
    _, distribution = fleet(msgspec.structs.replace(report("a", held="memory"), instances=[serving]), *here)
    supplies, sends = distribution.supply([pipelined(node, i) for i, node in enumerate("bcd")], KNOWN, 0.0)
    assert not sends
    found = [company(supplies, i, node) for i, node in enumerate("bcd")]
    assert [(c.pipeline, c.turn, c.turns) for c in found] == [(0, turn, 3) for turn in range(3)]
    assert [(c.key.generation, c.device, c.pipeline) for c in found[0].companions] == [
        *[(1, "c/host:0", 0), (2, "d/host:0", 0), (9, "a/host:0", None)]
    ]
    alone = company(distribution.supply([pipelined("b", 4)], KNOWN, 0.0)[0], 4, "b")
    assert [c.key.generation for c in alone.companions] == [9] and alone.turns == 1
    whole = company(distribution.supply([activate("b", 5), activate("c", 6)], KNOWN, 0.0)[0], 5, "b")
    assert whole == LiveCompany()


def test_who_comes_later_joins_what_runs_and_a_multicast_ends() -> None:
    nodes, distribution = fleet(report("a", held="memory"), report("b"), report("c"))
    first = parts(distribution.supply([activate("b", 1)], KNOWN, 0.0)[0][M, Generation(1)][NodeId("b")].plans)[0]
    late = parts(distribution.supply([activate("c", 2)], KNOWN, 1.0)[0][M, Generation(2)][NodeId("c")].plans)[0]
    assert late.session == first.session and late.receives == () and set(late.addresses) == {"a", "b", "c"}
    nodes.report(report("b"), 2.0)
    much_later_s = 1.0 + RUNS_S + 0.1
    again = parts(distribution.supply([activate("b", 3)], KNOWN, much_later_s)[0][M, Generation(3)][NodeId("b")].plans)[
        0
    ]
    assert again.session != first.session


def slow_links(age_s: float = 1.0) -> list[AgentReport]:
    """Four machines of which "a" has the model; whatever went to or from "b" took ten times as long."""
    rate = {"b": 1e8}
    links = {
        node: [LinkReport(source=s, bytes_s=min(rate.get(s, 1e9), rate.get(node, 1e9)), age_s=age_s) for s in sources]
        for node, sources in {"b": "ac", "c": "ab", "d": "abc"}.items()
    }
    size = 1 << 30
    held = [PackReport(model=MARK, layout=LAYOUT, nbytes=size, in_memory=True)]
    return [msgspec.structs.replace(report("a"), packs=held), *(report(n, links=found) for n, found in links.items())]


def plans_of(reports: list[AgentReport], now_s: float = 0.0) -> dict[str, NodePlan]:
    _, distribution = fleet(*reports)
    supplies, _ = distribution.supply([activate(node, i) for i, node in enumerate("bcd")], KNOWN, now_s)
    return {p.node: p for machines in supplies.values() for s in machines.values() for p in parts(s.plans)}


def test_a_link_that_was_measured_to_be_slow_passes_nothing_on() -> None:
    equal = plans_of([msgspec.structs.replace(r, links=[]) for r in slow_links()])
    assert all(plan.sends for plan in equal.values()), "with equal links everybody passes on"
    known = plans_of(slow_links())
    assert known["b"].sends == ()
    assert known["c"].sends or known["d"].sends
    assert sum(source == "a" for source, _ in known["b"].receives) < known["b"].pieces, "nor does it hold the source up"


def test_what_was_measured_is_believed_for_a_time() -> None:
    assert plans_of(slow_links(), now_s=LINK_KNOWN_S - 2)["b"].sends == ()
    assert plans_of(slow_links(), now_s=LINK_KNOWN_S)["b"].sends != ()
    assert plans_of(slow_links(age_s=LINK_KNOWN_S + 1))["b"].sends != ()


# --- coming and going ---


def kinds(events: list) -> list[type]:
    return [type(e) for e in events]


def test_a_broken_connection_shortens_the_wait_for_a_silent_machine() -> None:
    nodes, _ = fleet(report("a"), report("b"))
    broken = {"tcp://b:1"}.__contains__
    assert nodes.silent(BROKEN_AFTER_S, broken) == []
    assert nodes.silent(BROKEN_AFTER_S + 0.1, broken) == [NodeLost(NodeId("b"))]
    lost = [event for s in range(3, int(LOST_AFTER_S) + 2) for event in nodes.silent(float(s))]
    assert lost == [NodeLost(NodeId("a"))]


def test_a_leaving_machine_is_drained_once_and_then_lost() -> None:
    nodes, _ = fleet(report("b"))
    events = nodes.report(report("b", leaving=True), 1.0)
    assert kinds(events) == [DeviceReport, OperatorDrain]
    assert events[-1].devices == tuple(d.id for node in nodes.all() for d in node.devices), "all at once"
    assert kinds(nodes.report(report("b", leaving=True), 2.0)) == [DeviceReport]
    assert nodes.report(report("b", left=True), 3.0) == [NodeLost(NodeId("b"))]
    assert nodes.report(report("b", left=True), 3.1) == []
    assert kinds(nodes.report(report("b"), 4.0)) == [NodeJoined, DeviceReport]


# --- metrics ---


class Counted(Metrics):
    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def inc(self, metric: object, amount: float = 1.0, **labels: str) -> None:
        key = (metric.name, *labels.values())  # type: ignore[attr-defined]
        self.values[key] = self.values.get(key, 0.0) + amount

    def set(self, metric: object, value: float, **labels: str) -> None:
        self.values[(metric.name, *labels.values())] = value  # type: ignore[attr-defined]


def test_links_are_counted_once_however_often_they_are_reported() -> None:
    metrics = Counted()
    transfers = Transfers(metrics)

    def arrival(pieces: int, nbytes: int, seconds: float, took_s: float | None = None) -> AgentReport:
        one = ArrivalReport(
            session="s",
            model=M,
            mark=MARK,
            layout=LAYOUT,
            bytes_all=100,
            bytes_done=nbytes,
            pieces_all=4,
            pieces_done=pieces,
            sources={"a": (pieces, nbytes, seconds)},
            took_s=took_s,
        )
        return report("b", arriving=[one])

    for one in (arrival(1, 25, 1.0), arrival(1, 25, 1.0), arrival(4, 100, 2.5, 2.5), arrival(4, 100, 2.5, 2.5)):
        transfers.on_report(one)
    transfers.on_report(report("b"))
    assert metrics.values == {
        (names.WEIGHT_BLOCKS.name, "a", "b"): 4.0,
        (names.WEIGHT_BYTES.name, "a", "b"): 100.0,
        (names.LINK_RATE.name, "a", "b"): 50.0,
        (names.WEIGHT_ARRIVALS.name, "b", "ok"): 1.0,
    }


# --- what operators see ---


def test_which_machines_have_a_models_weights() -> None:
    nodes, _ = fleet(report("a", held="memory"), report("b", held="disk"), report("c"))
    models = SimpleNamespace(
        catalog=SimpleNamespace(models=[SimpleNamespace(name="m"), SimpleNamespace(name="cold")]),
        mark={M: MARK}.get,
    )
    controller = SimpleNamespace(nodes=nodes, models=models)
    assert Admin(controller)._held() == {"m": {"a": "memory", "b": "disk"}}  # type: ignore[arg-type]


def test_a_device_without_engines_is_drained_until_it_has_some_again() -> None:
    nodes = FleetNodes()
    nodes.report(report("a"), 0.0)
    device = DeviceId("a/host:0")

    def told(fault: str, **more: object) -> list[object]:
        said = report("a", **more)
        said = msgspec.structs.replace(said, devices=[msgspec.structs.replace(said.devices[0], fault=fault)])
        return [event for event in nodes.report(said, 1.0) if isinstance(event, OperatorDrain)]

    assert told("fell off the bus") == [OperatorDrain((device,), carry=True)]
    assert nodes.all()[0].faults == {device: "fell off the bus"}
    assert told("fell off the bus") == []
    assert told("") == [OperatorDrain((device,), on=False)] and nodes.all()[0].faults == {}
    told("again")
    assert told("", leaving=True) == [OperatorDrain((device,))], "a machine that leaves takes nothing back into service"
