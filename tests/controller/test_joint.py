"""One instance on several machines: what its machines say, in any order, again and again, or not at all."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prism.controller.joint import Holding, JointOrder, Leave, Step
from prism.core.events import ActivationError, ActivationFailed, ActivationFinished, DeactivationFinished
from prism.core.ids import Generation, ModelName, NodeId
from prism.core.instances import InstanceKey

KEY = InstanceKey(ModelName("m"), Generation(1))
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
NO_MEMORY = ActivationError.NO_MEMORY


def loading(*nodes: NodeId) -> JointOrder:
    return JointOrder(KEY, nodes, serves=False)


def test_it_is_ready_when_the_last_machine_is_and_took_as_long_as_the_slowest() -> None:
    joint = loading(A, B)
    assert joint.ready(A, 3.0) == [] and not joint.over
    assert joint.ready(A, 3.0) == []
    assert joint.ready(B, 1.0) == [ActivationFinished(KEY, 3.0)]
    assert joint.over and joint.ready(B, 1.0) == []


def test_a_failure_undoes_the_others_before_it_is_told() -> None:
    joint = loading(A, B, C)
    joint.ready(A, 1.0)
    assert joint.failed(B, NO_MEMORY, "full") == [Leave(A, True), Leave(C, True)]
    assert joint.ready(C, 2.0) == [], "it had loaded before it heard"
    assert joint.left(C) == []
    assert joint.left(A) == [ActivationFailed(KEY, NO_MEMORY, "full")]
    assert joint.over


def test_the_first_failure_is_the_one_that_is_told() -> None:
    joint = loading(A, B)
    assert joint.failed(A, NO_MEMORY, "full") == [Leave(B, True)]
    assert joint.failed(B, ActivationError.TIMEOUT, "slow") == [ActivationFailed(KEY, NO_MEMORY, "full")]
    assert joint.left(B) == []


def test_an_instance_on_one_machine_fails_at_once() -> None:
    joint = loading(A)
    assert joint.failed(A, NO_MEMORY, "full") == [ActivationFailed(KEY, NO_MEMORY, "full")]
    assert joint.over


def test_it_is_gone_when_the_last_machine_has_let_it_go() -> None:
    joint = JointOrder(KEY, [A, B], serves=True)
    assert joint.deactivate(carry=False) == [Leave(A, False), Leave(B, False)]
    assert joint.deactivate(carry=False) == []
    assert joint.left(A) == []
    assert joint.deactivate(carry=True) == [Leave(B, True)], "hurried"
    assert joint.deactivate(carry=True) == []
    assert joint.left(B) == [DeactivationFinished(KEY)]


def test_told_to_leave_while_it_loads() -> None:
    joint = loading(A, B)
    assert joint.deactivate(carry=False) == [Leave(A, False), Leave(B, False)]
    assert joint.ready(A, 1.0) == []
    assert joint.ready(B, 1.0) == [ActivationFinished(KEY, 1.0)], "who waits for it hears that it was loaded"
    assert joint.left(A) == []
    assert joint.left(B) == [DeactivationFinished(KEY)]


def test_a_lost_machine_takes_the_rest_with_it_and_nobody_is_told_twice() -> None:
    joint = loading(A, B)
    joint.ready(A, 1.0)
    assert joint.lost(B) == [Leave(A, True)]
    assert joint.lost(B) == []
    assert joint.left(A) == [] and joint.over


def test_machines_of_other_instances_do_not_matter() -> None:
    joint = loading(A)
    assert joint.lost(B) == [] == joint.left(B) == joint.failed(B, NO_MEMORY, "")
    assert joint.holds(A) is Holding.LOADING


class Fleet(RuleBasedStateMachine):
    """Agents that answer every command they got, some of them several times, in any order; machines may die."""

    @initialize(count=st.integers(1, 4), serves=st.booleans())
    def begin(self, count: int, serves: bool) -> None:
        self.nodes = [NodeId(f"n{i}") for i in range(count)]
        self.joint = JointOrder(KEY, self.nodes, serves=serves)
        self.here = dict.fromkeys(self.nodes, True)
        """Whether the machine has its parts (loaded or loading)."""
        self.loads = {node for node in self.nodes if not serves}
        """Machines that have not answered the activation yet."""
        self.leaves: set[NodeId] = set()
        """Machines that have to answer a deactivation."""
        self.dead: set[NodeId] = set()
        self.told: Counter[type] = Counter()
        self.heard: list[tuple[NodeId, bool]] = []

    def do(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Leave):
                assert step.node not in self.dead, "a dead machine was told something"
                self.leaves.add(step.node)
            else:
                self.told[type(step)] += 1
                if isinstance(step, ActivationFinished):
                    assert not self.told[ActivationFailed] and not self.told[DeactivationFinished]
                else:
                    assert not any(self.here[n] for n in self.nodes if n not in self.dead), "something is left"

    @precondition(lambda self: self.loads - self.dead)
    @rule(data=st.data(), ok=st.booleans())
    def answers(self, data: st.DataObject, ok: bool) -> None:
        node = data.draw(st.sampled_from(sorted(self.loads - self.dead)))
        self.loads.discard(node)
        self.heard.append((node, ok))
        self.here[node] = ok
        self.do(self.joint.ready(node, 1.0) if ok else self.joint.failed(node, NO_MEMORY, ""))

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def answers_again(self, data: st.DataObject) -> None:
        node, ok = data.draw(st.sampled_from(self.heard))
        if node not in self.dead:
            self.do(self.joint.ready(node, 1.0) if ok else self.joint.failed(node, NO_MEMORY, ""))

    @precondition(lambda self: self.leaves - self.loads - self.dead)
    @rule(data=st.data(), again=st.booleans())
    def leaves_now(self, data: st.DataObject, again: bool) -> None:
        """An agent lets go of what has loaded, and answers; it may answer twice."""
        node = data.draw(st.sampled_from(sorted(self.leaves - self.loads - self.dead)))
        self.here[node] = False
        if not again:
            self.leaves.discard(node)
        self.do(self.joint.left(node))

    @rule(carry=st.booleans())
    def deactivate(self, carry: bool) -> None:
        self.do(self.joint.deactivate(carry))

    @precondition(lambda self: len(self.dead) < len(self.nodes))
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(set(self.nodes) - self.dead)))
        self.dead.add(node)
        self.do(self.joint.lost(node))

    @invariant()
    def nothing_is_told_twice(self) -> None:
        for kind in (ActivationFinished, ActivationFailed, DeactivationFinished):
            assert self.told[kind] <= 1
        assert self.told[ActivationFailed] + self.told[DeactivationFinished] <= 1

    def teardown(self) -> None:
        """Whoever still has to answer does; then it is over: everywhere, or nowhere and the scheduler knows."""
        if not hasattr(self, "joint"):
            return
        for node in sorted(self.loads - self.dead):
            self.loads.discard(node)
            self.do(self.joint.ready(node, 1.0))
        for node in sorted(self.leaves - self.dead):
            self.here[node] = False
            self.do(self.joint.left(node))
        assert self.joint.over
        living = [node for node in self.nodes if node not in self.dead]
        if any(self.here[node] for node in living):
            assert all(self.here[node] for node in self.nodes) and not self.dead
        elif not self.dead:
            assert self.told[ActivationFailed] + self.told[DeactivationFinished] == 1


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=200, deadline=None)
