"""Who is told to bring the KV of an instance that has left."""

from __future__ import annotations

from prism.controller.kv_follow import kv_orders
from prism.controller.nodes import FleetNodes
from prism.controller.placement import PlacementBook
from prism.core.effects import Activate, Deactivate
from prism.core.events import ActivationFinished
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.store.memory import MemoryStore
from prism.wire.commands import BringKv
from prism.wire.messages import AgentReport

M, MARK = ModelName("m"), "0123abcd"
REASON = because(ReasonCode.OPERATOR)


def key(generation: int, model: ModelName = M) -> InstanceKey:
    return InstanceKey(model, Generation(generation))


class Bench:
    """Machines "a" to "d" (which has no weight server), and instances on them by generation."""

    def __init__(self, *on: str) -> None:
        self.fleet, self.placement = FleetNodes(), PlacementBook(MemoryStore())
        for node in "abcd":
            mailbox, weights = f"tcp://{node}:1", "" if node == "d" else f"{node}:2"
            report = AgentReport(
                node=node, incarnation="one", mailbox=mailbox, devices=[], instances=[], weights=weights
            )
            self.fleet.report(report, 0.0)
        for generation, nodes in enumerate(on, 1):
            self.activate(key(generation), nodes)
            self.placement.note(ActivationFinished(key(generation), 1.0), 0.0)
        self.placement.route(M, [DeviceId(f"{nodes[0]}/host:0") for nodes in on], 0.0)

    def activate(self, of: InstanceKey, nodes: str) -> None:
        self.placement.ordered(Activate(of, self.parts(nodes), REASON), 0.0)

    @staticmethod
    def parts(nodes: str) -> tuple:  # type: ignore[type-arg]
        return tuple(part for node in nodes for part in whole_model([DeviceId(f"{node}/host:0")]))

    def leave(self, generation: int, nodes: str, mark: str = MARK) -> dict[str, BringKv]:
        self.placement.ordered(Deactivate(key(generation), self.parts(nodes), False, REASON), 0.0)
        return dict(kv_orders(key(generation), mark, self.placement, self.fleet))


def test_machines_that_have_the_model_bring_what_the_one_that_left_has_stored() -> None:
    bench = Bench("a", "b")
    bench.activate(key(3), "c")  # still loads: its own question came too early
    bench.activate(key(4, ModelName("another")), "c")
    order = BringKv(model=M, mark=MARK, peers={"a": "a:2"})
    assert bench.leave(1, "a") == {"tcp://b:1": order, "tcp://c:1": order}
    assert bench.leave(1, "a", mark="") == {}, "nobody could find it"


def test_nobody_is_told_who_has_it_already_or_lets_it_go() -> None:
    assert Bench("a").leave(1, "a") == {}, "the model is nowhere else"
    assert Bench("a", "a").leave(1, "a") == {}, "one pool to a machine"
    assert Bench("d", "b").leave(1, "d") == {}, "it cannot be asked"
    bench = Bench("a", "b", "c")
    assert set(bench.leave(2, "b")) == {"tcp://a:1", "tcp://c:1"}
    assert set(bench.leave(1, "a")) == {"tcp://c:1"}, "b is leaving, too"


def test_an_instance_of_several_machines_is_asked_for_on_all_of_them() -> None:
    (order,) = Bench("ab", "c").leave(1, "ab").values()
    assert order.peers == {"a": "a:2", "b": "b:2"}
