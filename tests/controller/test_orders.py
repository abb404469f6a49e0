"""Commands to agents: one per machine, repeated until answered, their answers joined."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prism.controller.distribution import Supply
from prism.controller.orders import REPEAT_S, Orders
from prism.core.effects import Activate, Deactivate
from prism.core.events import ActivationError, ActivationFailed, ActivationFinished, DeactivationFinished
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, LayerRange, Part, Parts, Role, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.specs import ModelShape, ModelSpec
from prism.wire.commands import ActivateCommand, DeactivateCommand
from prism.wire.message import Message
from prism.wire.messages import CommandResult
from tests.outbox import NotedOutbox

M = ModelName("m")
SPEC = ModelSpec(M, "/m", 1.0, 0.1, 100, ModelShape(32, 8, 1, 1, 8, 16, 10), 128)
REASON = because(ReasonCode.DEMAND)
ONE = whole_model([DeviceId("a/host:0")])
TWO: Parts = (
    Part((DeviceId("a/host:0"),), LayerRange(0, 16), Role.STAGE),
    Part((DeviceId("b/host:0"),), LayerRange(16, 32), Role.STAGE),
)
A, B = NodeId("a"), NodeId("b")


class Bench:
    """Orders to machines ``up``, whose mailboxes are called like them."""

    def __init__(self, up: Sequence[NodeId] = (A, B)) -> None:
        self.up = set(up)
        self.outbox = NotedOutbox()
        self.orders = Orders(self.outbox, "c", self)  # type: ignore[arg-type]

    def mailbox_of(self, node: NodeId) -> str | None:
        return node if node in self.up else None

    def activate(self, parts: Parts, generation: int = 1) -> list[object]:
        effect = Activate(key(generation), parts, REASON)
        return list(self.orders.activate(effect, SPEC, {B: Supply(mark="weights")}, 0.0))

    def deactivate(self, parts: Parts, carry: bool = False) -> list[object]:
        return list(self.orders.deactivate(Deactivate(key(1), parts, carry, REASON), 0.0))

    def taken(self) -> list[tuple[str, Message]]:
        """What was sent since the last call."""
        sent, self.outbox.sent = self.outbox.sent, []
        return sent

    def says(self, message: Message, error: str = "", **phases: float) -> list[object]:
        assert isinstance(message, ActivateCommand | DeactivateCommand)
        detail: dict[str, object] = {"detail": "x"} if error else {}
        result = CommandResult(command=message.command, ok=not error, error=error, detail=detail, phases=phases)
        return list(self.orders.answer(result, 1.0))


def key(generation: int) -> InstanceKey:
    return InstanceKey(M, Generation(generation))


def kinds(sent: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(mailbox, type(message).__name__) for mailbox, message in sent]


def test_orders_are_repeated_until_answered_and_answered_once() -> None:
    bench = Bench()
    assert bench.activate(ONE) == []
    bench.orders.repeat(REPEAT_S / 2)
    assert len(bench.outbox.sent) == 1
    bench.orders.repeat(REPEAT_S)
    (_, first), (_, second) = bench.taken()
    assert first == second
    assert bench.says(first, total=0.2) == [ActivationFinished(key(1), 0.2)]
    assert bench.says(first, total=0.2) == []
    bench.orders.repeat(100.0)
    assert not bench.taken() and not bench.orders.under_way(key(1))


@pytest.mark.parametrize(
    ("error", "expected"), [("no_memory", ActivationError.NO_MEMORY), ("internal", ActivationError.ENGINE_DIED)]
)
def test_answers_say_why_an_activation_failed(error: str, expected: ActivationError) -> None:
    bench = Bench()
    bench.activate(ONE)
    [(_, command)] = bench.taken()
    assert bench.says(command, error) == [ActivationFailed(key(1), expected, "x")]


def test_a_machine_that_is_not_up_fails_at_once() -> None:
    assert Bench([B]).activate(ONE) == [ActivationFailed(key(1), ActivationError.STALE, "machine a is gone")]


def test_every_machine_gets_a_command_with_all_parts_and_its_own_supply() -> None:
    bench = Bench()
    bench.activate(TWO)
    sent = bench.taken()
    assert kinds(sent) == [("a", "ActivateCommand"), ("b", "ActivateCommand")]
    commands = [m for _, m in sent if isinstance(m, ActivateCommand)]
    assert [c.parts for c in commands] == [TWO, TWO]
    assert [c.mark for c in commands] == ["", "weights"]
    assert bench.says(commands[1], total=3.0) == []
    assert bench.says(commands[0], total=1.0) == [ActivationFinished(key(1), 3.0)]


def test_what_failed_on_one_machine_is_undone_on_the_others() -> None:
    bench = Bench()
    bench.activate(TWO)
    (_, first), (_, second) = bench.taken()
    assert bench.says(first) == []
    assert bench.says(second, "no_memory") == []
    [(mailbox, undo)] = bench.taken()
    assert mailbox == "a" and isinstance(undo, DeactivateCommand) and undo.carry
    assert bench.says(undo) == [ActivationFailed(key(1), ActivationError.NO_MEMORY, "x")]
    bench.orders.repeat(100.0)
    assert not bench.taken()


def test_one_machine_of_two_is_not_up() -> None:
    bench = Bench([A])
    assert bench.activate(TWO) == []
    (_, activate), (mailbox, undo) = bench.taken()
    assert mailbox == "a" and bench.says(activate) == []
    assert bench.says(undo) == [ActivationFailed(key(1), ActivationError.STALE, "machine b is gone")]


def test_it_is_gone_when_all_machines_say_so_and_a_broken_deactivation_is_ordered_again() -> None:
    bench = Bench()
    bench.deactivate(TWO)
    (_, first), (_, second) = bench.taken()
    assert bench.says(first) == []
    assert bench.says(second, "internal") == []
    bench.orders.repeat(REPEAT_S)
    assert [m for _, m in bench.taken()] == [second]
    assert bench.says(second) == [DeactivationFinished(key(1))]


def test_a_deactivation_may_overtake_the_activation_it_ends() -> None:
    bench = Bench()
    bench.activate(ONE)
    bench.deactivate(ONE)
    (_, activate), (_, leave) = bench.taken()
    assert bench.says(activate, total=0.1) == [ActivationFinished(key(1), 0.1)]
    assert bench.says(leave) == [DeactivationFinished(key(1))]
    assert not bench.orders.under_way(key(1))


def test_orders_to_a_lost_machine_end_and_what_others_had_of_its_instances_leaves() -> None:
    bench = Bench()
    bench.activate(TWO)
    (_, first), _ = bench.taken()
    bench.up.discard(B)
    bench.orders.node_lost(B, 0.0)
    [(mailbox, undo)] = bench.taken()
    assert mailbox == "a" and isinstance(undo, DeactivateCommand)
    assert bench.says(first) == []
    assert bench.says(undo) == [], "the scheduler has heard that the machine is gone"
    bench.orders.repeat(100.0)
    assert not bench.taken() and not bench.orders.under_way(key(1))


def test_what_is_left_of_a_lost_instance_is_withdrawn_once() -> None:
    bench = Bench()
    bench.orders.withdraw(key(1), [B], 0.0)
    bench.orders.withdraw(key(1), [B], 1.0)
    [(mailbox, leave)] = bench.taken()
    assert mailbox == "b" and bench.says(leave) == [DeactivationFinished(key(1))]
