"""Who is told to take the KV of a machine that leaves, and what that machine hears of it."""

from __future__ import annotations

from prism.controller.kv_takers import KvTakerBook
from prism.controller.nodes import FleetNodes
from prism.controller.placement import PlacementBook
from prism.core.effects import Activate
from prism.core.events import ActivationFinished
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.store.memory import MemoryStore
from prism.wire.commands import BringKv, KvTakers
from prism.wire.messages import AgentReport
from prism.wire.reports import PackReport

M, N, MARK, OTHER = ModelName("m"), ModelName("n"), "0123abcd", "4567cdef"
MODELS = {MARK: M, OTHER: N}


class Bench:
    """Machines "a" to "d"; "a" leaves, "d" keeps no KV."""

    def __init__(self, known: bool = True) -> None:
        self.fleet, self.placement = FleetNodes(), PlacementBook(MemoryStore())
        self.book = KvTakerBook(self.placement, self.fleet)
        if known:
            self.book.fleet_known()
        for node in "abcd":
            self.report(node)

    def report(self, node: str, *, packs: tuple[str, ...] = (), leaving: bool = False, left: bool = False) -> None:
        self.fleet.report(self.made(node, {}, packs=packs, leaving=leaving, left=left), 0.0)

    @staticmethod
    def made(
        node: str,
        held: dict[str, int],
        *,
        packs: tuple[str, ...] = (),
        leaving: bool = False,
        left: bool = False,
        failed: dict[str, list[str]] | None = None,
    ) -> AgentReport:
        return AgentReport(
            kv_failed=failed or {},
            node=node,
            incarnation=f"{node} one",
            mailbox=f"tcp://{node}:1",
            devices=[],
            instances=[],
            weights=f"{node}:2",
            packs=[PackReport(model=mark, layout="", nbytes=1, in_memory=True) for mark in packs],
            kv_bytes=0 if node == "d" else 1000,
            kv_held=held,
            leaving=leaving,
            left=left,
        )

    def serve(self, model: ModelName, node: str) -> None:
        key = InstanceKey(model, Generation(1))
        parts = whole_model([DeviceId(f"{node}/host:0")])
        self.placement.ordered(Activate(key, parts, because(ReasonCode.OPERATOR)), 0.0)
        self.placement.note(ActivationFinished(key, 1.0), 0.0)

    def leaves(
        self, held: dict[str, int], failed: dict[str, list[str]] | None = None
    ) -> tuple[dict[tuple[str, str], BringKv], dict[str, str]]:
        """Who is told what (by mailbox and fingerprint), and what "a" hears."""
        sent = list(self.book.on_report(self.made("a", held, leaving=True, failed=failed), MODELS))
        if not sent:
            return {}, {}
        mailbox, answer = sent.pop()
        assert mailbox == "tcp://a:1" and isinstance(answer, KvTakers)
        told = {(to, m.mark): m for to, m in sent if isinstance(m, BringKv)}
        assert len(told) == len(sent)
        return told, answer.takers


def test_each_model_goes_to_one_machine_once() -> None:
    bench = Bench()
    told, takers = bench.leaves({MARK: 300, OTHER: 200})
    assert takers == {MARK: "b", OTHER: "c"}, "by room"
    assert told[("tcp://b:1", MARK)] == BringKv(model=M, mark=MARK, peers={"a": "a:2"})
    assert set(told) == {("tcp://b:1", MARK), ("tcp://c:1", OTHER)}
    assert bench.leaves({MARK: 300, OTHER: 200}) == ({}, takers), "the answer again, and no order"
    assert bench.leaves({}) == ({}, {})


def test_where_the_model_or_its_weights_are_comes_first() -> None:
    bench = Bench()
    bench.report("c", packs=(MARK,))
    bench.serve(N, "b")
    assert bench.leaves({MARK: 900, OTHER: 900, "unknown": 1})[1] == {MARK: "c", OTHER: "b", "unknown": "b"}
    bench.serve(M, "b")
    assert bench.leaves({MARK: 900})[1] == {MARK: "c"}, "who was told goes on"


def test_who_is_gone_or_leaves_is_replaced() -> None:
    bench = Bench()
    assert bench.leaves({MARK: 300})[1] == {MARK: "b"}
    bench.report("b", left=True)
    told, takers = bench.leaves({MARK: 300})
    assert set(told) == {("tcp://c:1", MARK)} and takers == {MARK: "c"}
    bench.report("c", leaving=True)
    assert bench.leaves({MARK: 300}) == ({}, {MARK: ""}), "nobody keeps KV"


def test_whom_the_one_that_leaves_has_given_up_is_replaced() -> None:
    bench = Bench()
    assert bench.leaves({MARK: 300, OTHER: 200})[1] == {MARK: "b", OTHER: "c"}
    told, takers = bench.leaves({MARK: 300, OTHER: 200}, {MARK: ["b"]})
    assert set(told) == {("tcp://c:1", MARK)} and takers == {MARK: "c", OTHER: "c"}
    assert bench.leaves({MARK: 300, OTHER: 200}, {MARK: ["b"]}) == ({}, takers)
    assert bench.leaves({MARK: 300, OTHER: 200}, {MARK: ["b", "c"], OTHER: ["c"]})[1] == {MARK: "", OTHER: "b"}


def test_a_controller_that_has_not_heard_of_all_machines_does_not_say_that_nobody_can_take_it() -> None:
    """The machine that leaves may be the first that it hears of."""
    bench = Bench(known=False)
    for node in "bc":
        bench.report(node, left=True)
    assert bench.leaves({MARK: 300}) == ({}, {})
    bench.report("c")
    told, takers = bench.leaves({MARK: 300})
    assert set(told) == {("tcp://c:1", MARK)} and takers == {MARK: "c"}
    bench.report("c", left=True)
    assert bench.leaves({MARK: 300}) == ({}, {})
    bench.book.fleet_known()
    assert bench.leaves({MARK: 300}) == ({}, {MARK: ""})
