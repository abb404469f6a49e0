"""The controller's parts: the fleet, the inactive queue, orders, placement."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from prism.controller.controller import Controller
from prism.controller.inactive import InactiveQueue, Refusal
from prism.controller.nodes import LOST_AFTER_S, FleetNodes
from prism.controller.placement import PlacementBook
from prism.controller.versions import Versions
from prism.core.effects import Activate, Deactivate
from prism.core.events import (
    ActivationFinished,
    DeactivationFinished,
    DeviceReport,
    InstanceFound,
    InstanceLost,
    NodeJoined,
    NodeLost,
)
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, LayerRange, Part, Role, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.specs import ModelShape, ModelSpec
from prism.core.views import InstanceState
from prism.store.connect import open_store
from prism.store.ledger import Ledger
from prism.store.memory import MemoryStore
from prism.store.values import AgentRecord, LeaseLost
from prism.wire import keys
from prism.wire.message import PROTOCOL_VERSION
from prism.wire.messages import AgentReport, Failed, Submission, encode
from prism.wire.reports import DeviceStatus, InstanceReport, Stillborn
from tests.outbox import NotedOutbox

M, D = ModelName("m"), DeviceId("n1/host:0")
SPEC = ModelSpec(M, "/m", 1.0, 0.1, 100, ModelShape(1, 8, 1, 1, 8, 16, 10), 128)
REASON = because(ReasonCode.DEMAND)


STAGES = (
    Part((D,), LayerRange(0, 1), Role.STAGE),
    Part((DeviceId("n2/host:0"),), LayerRange(1, 2), Role.STAGE),
)


def report(*instances: InstanceReport, incarnation: str = "one", node: str = "n1") -> AgentReport:
    state = DeviceStatus(
        id=f"{node}/host:0", kind="host", domain="", capacity_bytes=1000, free_bytes=600, memory_short_s=0.3
    )
    devices = [state]
    return AgentReport(
        node=node,
        protocol=PROTOCOL_VERSION,
        incarnation=incarnation,
        mailbox="ipc:///a",
        devices=devices,
        instances=list(instances),
    )


def instance(state: InstanceState, generation: int = 1) -> InstanceReport:
    return InstanceReport(key=key(generation), parts=whole_model([D]), state=state, weight_bytes=100, running=2)


def stage(generation: int) -> InstanceReport:
    """Both machines' part of an instance on two."""
    return InstanceReport(key=key(generation), parts=STAGES, state=InstanceState.READY, weight_bytes=100, running=2)


def key(generation: int) -> InstanceKey:
    return InstanceKey(M, Generation(generation))


def kinds(events: list) -> list[type]:
    return [type(e) for e in events]


def test_a_new_node_joins_with_what_it_serves() -> None:
    events = FleetNodes().report(report(instance(InstanceState.READY), instance(InstanceState.LOADING, 2)), 0.0)
    assert kinds(events) == [NodeJoined, DeviceReport]
    assert events[0].found == (
        InstanceFound(key(1), whole_model([D])),
        InstanceFound(key(2), whole_model([D]), loading=True),
    ), "with it, not after it"
    loads = events[-1].instances
    assert [(x.key.generation, x.running) for x in loads] == [(1, 2), (2, 2)]
    assert (events[-1].free_bytes, events[-1].memory_short_s) == (600, 0.3)


def test_only_fresh_instances_are_named_before_a_report_is_taken() -> None:
    nodes, serving = FleetNodes(), report(instance(InstanceState.READY), instance(InstanceState.LOADING, 2))
    assert nodes.fresh_in(serving) == {M}
    nodes.report(serving, 0.0)
    assert nodes.fresh_in(serving) == set()
    again = msgspec.structs.replace(serving, incarnation="two")
    assert nodes.fresh_in(again) == {M}, "a restarted agent joins anew with all it has"


def test_an_instance_that_loads_when_its_machine_joins_is_followed() -> None:
    """Whoever ordered it hears what becomes of it; a new controller goes by the reports."""
    nodes = FleetNodes()
    nodes.report(report(instance(InstanceState.LOADING)), 0.0)
    assert kinds(nodes.report(report(instance(InstanceState.LOADING)), 1.0)) == [DeviceReport]
    served = nodes.report(report(instance(InstanceState.READY)), 2.0)
    assert served[0] == InstanceFound(key(1), whole_model([D]))
    other = FleetNodes()
    other.report(report(instance(InstanceState.LOADING)), 0.0)
    assert other.report(report(), 1.0)[0] == InstanceLost(key(1))
    assert kinds(other.report(report(), 2.0)) == [DeviceReport], "once"
    assert kinds(other.report(report(instance(InstanceState.LOADING, 2)), 3.0)) == [DeviceReport], "ordered since"


def test_an_instance_that_loads_on_two_machines_is_found_with_the_second() -> None:
    nodes, begins = FleetNodes(), msgspec.structs.replace(stage(1), state=InstanceState.LOADING)
    assert nodes.report(report(begins, node="n1"), 0.0)[0].found == ()
    joined = nodes.report(report(stage(1), node="n2"), 1.0)
    assert joined[0].found == (InstanceFound(key(1), STAGES, loading=True),), "one part serves, one does not"
    assert nodes.report(report(stage(1), node="n1"), 2.0)[0] == InstanceFound(key(1), STAGES)


def test_an_instance_that_vanishes_from_the_reports_is_lost_once() -> None:
    nodes = FleetNodes()
    nodes.report(report(instance(InstanceState.READY)), 0.0)
    assert kinds(nodes.report(report(), 1.0)) == [InstanceLost, DeviceReport]
    assert kinds(nodes.report(report(), 2.0)) == [DeviceReport]


def test_an_instance_that_dies_between_the_answer_and_the_next_report_is_lost() -> None:
    nodes = FleetNodes()
    nodes.report(report(instance(InstanceState.LOADING)), 0.0)
    nodes.answered(key(1), whole_model([D]))
    assert kinds(nodes.report(report(), 1.0)) == [InstanceLost, DeviceReport]
    nodes.answered(key(2), whole_model([D]))
    assert kinds(nodes.report(report(instance(InstanceState.READY, 2)), 2.0)) == [DeviceReport], (
        "the answer has said so"
    )
    assert kinds(nodes.report(report(instance(InstanceState.DRAINING, 2)), 3.0)) == [DeviceReport]
    assert kinds(nodes.report(report(), 4.0)) == [DeviceReport], "it left"


def test_a_lost_instance_comes_with_what_its_engine_said() -> None:
    nodes = FleetNodes()
    nodes.report(report(instance(InstanceState.READY), instance(InstanceState.READY, 2)), 0.0)
    died = msgspec.structs.replace(report(), stillborn=[Stillborn(key=key(2), reason="no logits")])
    lost = [e for e in nodes.report(died, 1.0) if isinstance(e, InstanceLost)]
    assert [(e.key.generation, e.stillborn) for e in lost] == [(1, ""), (2, "no logits")]


def test_a_failed_activation_is_no_loss() -> None:
    nodes = FleetNodes()
    nodes.report(report(), 0.0)
    nodes.report(report(instance(InstanceState.LOADING)), 0.5)
    assert kinds(nodes.report(report(), 1.0)) == [DeviceReport]


def test_a_restarted_agent_has_lost_everything_before_it_joins_again() -> None:
    nodes = FleetNodes()
    nodes.report(report(instance(InstanceState.READY)), 0.0)
    assert kinds(nodes.report(report(incarnation="two"), 1.0)) == [NodeLost, NodeJoined, DeviceReport]


def test_a_silent_node_is_lost_and_its_mailbox_forgotten() -> None:
    nodes = FleetNodes()
    nodes.report(report(), 0.0)
    assert nodes.mailbox_of(NodeId("n1")) == "ipc:///a"
    assert [nodes.silent(s) for s in range(1, int(LOST_AFTER_S) + 1)] == [[]] * int(LOST_AFTER_S)
    assert nodes.silent(LOST_AFTER_S + 0.1) == [NodeLost(NodeId("n1"))]
    assert nodes.mailbox_of(NodeId("n1")) is None


def test_a_controller_that_stood_still_does_not_take_the_others_for_silent() -> None:
    nodes = FleetNodes()
    nodes.report(report(), 0.0)
    nodes.silent(1.0)
    assert nodes.silent(1000.0) == [], "their reports may be there, unread"
    gone = [s for s in range(1001, 1010 + int(LOST_AFTER_S)) if nodes.silent(float(s))]
    assert len(gone) == 1


async def test_a_lease_that_ended_unnoticed_is_taken_again_unless_another_had_it() -> None:
    store = MemoryStore(lambda: 0.0)  # leases end only where the test ends them
    inbox = SimpleNamespace(keys=None, address="ipc:///c")
    nothing = SimpleNamespace(on_event=None)
    controller = Controller(nothing, nothing, store, inbox, nothing, nothing)  # type: ignore[arg-type]
    await controller.lease.take()
    publishing = asyncio.create_task(controller.placement.publish(lambda: controller.lease.holder))
    await store.release_lease(controller.lease.holder)  # as if it had run out
    controller.placement.note(InstanceFound(key(1), whole_model([D])), 0.0)
    await asyncio.sleep(0)
    await controller.lease.renew()
    await controller.placement.published()
    assert list(await store.placement()) == [M]
    publishing.cancel()
    await store.release_lease(controller.lease.holder)
    other = await store.acquire_lease("other", "ipc:///o", 60.0)
    assert other is not None
    with pytest.raises(LeaseLost):
        await controller.lease.renew()
    await store.release_lease(other)
    with pytest.raises(LeaseLost):
        await controller.lease.renew()
    controller.outbox.close()


@pytest.mark.parametrize("first", ["n1", "n2"])
def test_an_instance_on_two_machines_is_found_when_both_have_shown_it(first: str) -> None:
    nodes = FleetNodes()
    other = "n2" if first == "n1" else "n1"
    assert kinds(nodes.report(report(stage(1), node=first), 0.0)) == [NodeJoined, DeviceReport]
    found = nodes.report(report(stage(1), node=other), 1.0)
    assert kinds(found) == [NodeJoined, DeviceReport] and found[0].found == (InstanceFound(key(1), STAGES),)
    assert kinds(nodes.report(report(stage(1), node=first), 2.0)) == [DeviceReport]


def test_requests_are_counted_where_the_queue_is() -> None:
    nodes = FleetNodes()
    loads = [nodes.report(report(stage(1), node=node), 0.0)[-1].instances[0] for node in ("n1", "n2")]
    assert [load.running for load in loads] == [2, 0]


def test_an_instance_that_loses_a_part_is_lost_once_and_the_rest_of_it_is_a_stray() -> None:
    nodes = FleetNodes()
    for node in ("n1", "n2"):
        nodes.report(report(stage(1), node=node), 0.0)
    assert nodes.strays(0.0) == []
    assert nodes.report(report(node="n2"), 1.0)[0] == InstanceLost(key(1))
    assert nodes.strays(1.0) == [(key(1), ["n1"])]
    assert kinds(nodes.report(report(stage(1), node="n1"), 2.0)) == [DeviceReport]
    assert kinds(nodes.report(report(node="n1"), 3.0)) == [DeviceReport], "the scheduler was told already"
    assert nodes.strays(3.0) == []


def test_a_lost_machine_leaves_strays_behind() -> None:
    nodes = FleetNodes()
    for node in ("n1", "n2"):
        nodes.report(report(stage(1), node=node), 0.0)
    assert kinds(nodes.report(report(node="n2", incarnation="two"), 1.0))[0] is NodeLost
    assert nodes.strays(1.0) == [(key(1), ["n1"])]


def test_parts_whose_others_are_never_heard_of_are_strays_after_a_while() -> None:
    nodes = FleetNodes()
    nodes.report(report(stage(1), node="n1"), 0.0)
    assert nodes.strays(1.0) == []
    assert nodes.strays(1.0 + LOST_AFTER_S) == []
    assert nodes.strays(1.1 + LOST_AFTER_S) == [(key(1), ["n1"])]


def test_an_agent_of_another_version_is_refused_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    versions = Versions()
    assert versions.agree(report())
    older = msgspec.structs.replace(report(), protocol=1)
    assert not versions.agree(older) and not versions.agree(older)
    versions.look(AgentRecord(node=NodeId("n2"), mailbox="ipc:///b", devices=[], seen_s=0.0))
    assert ["n1" in caplog.messages[0], "n2" in caplog.messages[1], len(caplog.messages)] == [True, True, 2]
    assert f"version 1 of Prism's messages, this controller version {PROTOCOL_VERSION}" in caplog.messages[0]


async def test_waiting_requests_are_moved_refused_or_cancelled() -> None:
    store, outbox = open_store("memory://"), NotedOutbox()
    ledger = Ledger(store, "c")
    queue = InactiveQueue(ledger, outbox)  # type: ignore[arg-type]
    for id in ("a", "b", "c", "d"):
        await store.add(keys.INACTIVE_QUEUE, id, encode(submission(id)))
    for entry in await store.read_new([keys.INACTIVE_QUEUE], "c", 10, 0):
        state = queue.add(entry, entry.submission)
    assert (state.count, state.tokens, state.oldest_arrival_s, state.tightest_deadline_s) == (4, 40, 5.0, 6.0)
    cancelled = queue.cancel("a")
    assert cancelled is not None and cancelled.count == 3
    assert queue.cancel("a") is None
    assert queue.route(M, [D, DeviceId("n1/host:1")]).count == 0
    await ledger.drain()
    assert await store.lengths([keys.INACTIVE_QUEUE, keys.device_queue(D)]) == [0, 2]
    moved = await store.read_new([keys.device_queue(D)], "x", 10, 0)
    assert [e.submission.hops for e in moved] == [1, 1]
    assert not outbox.sent


async def test_waiting_requests_go_to_the_least_loaded_device() -> None:
    store, other = open_store("memory://"), DeviceId("n1/host:1")
    ledger = Ledger(store, "c")
    queue = InactiveQueue(ledger, NotedOutbox())  # type: ignore[arg-type]
    for id in ("a", "b", "c", "d"):
        await store.add(keys.INACTIVE_QUEUE, id, encode(submission(id)))
    for entry in await store.read_new([keys.INACTIVE_QUEUE], "c", 10, 0):
        queue.add(entry, entry.submission)
    for number in range(6):
        await store.add(keys.device_queue(D), f"runs {number}", b"")
        await store.tell_running(keys.device_queue(D), number + 1)
    assert queue.route(M, [D, other], 1).count == 3
    await ledger.drain()
    assert await store.lengths([keys.device_queue(D), keys.device_queue(other)]) == [6, 1]
    assert [e.submission.id for e in await store.read_new([keys.device_queue(other)], "x", 10, 0)] == ["a"]
    await store.tell_running(keys.device_queue(other), 1)
    queue.route(M, [D, other])
    await ledger.drain()
    assert await store.lengths([keys.device_queue(D), keys.device_queue(other)]) == [7, 3]


async def test_refused_requests_get_an_error_and_leave_the_queue() -> None:
    store, outbox = open_store("memory://"), NotedOutbox()
    ledger = Ledger(store, "c")
    queue = InactiveQueue(ledger, outbox)  # type: ignore[arg-type]
    await store.add(keys.INACTIVE_QUEUE, "a", encode(submission("a")))
    (entry,) = await store.read_new([keys.INACTIVE_QUEUE], "c", 10, 0)
    queue.add(entry, entry.submission)
    assert queue.refuse(M, Refusal(503, "no_room", "no room", 3.0)).count == 0
    await ledger.drain()
    (_, failed) = outbox.sent[0]
    assert isinstance(failed, Failed) and failed.retry_after_s == 3.0
    assert await store.lengths([keys.INACTIVE_QUEUE]) == [0]


async def test_only_the_oldest_or_the_overdue_are_refused_when_asked_so() -> None:
    store, outbox = open_store("memory://"), NotedOutbox()
    queue = InactiveQueue(Ledger(store, "c"), outbox)  # type: ignore[arg-type]
    for arrival_s in (1.0, 2.0, 3.0, 4.0):
        await store.add(keys.INACTIVE_QUEUE, f"r{arrival_s:.0f}", encode(submission(f"r{arrival_s:.0f}", arrival_s)))
    for entry in await store.read_new([keys.INACTIVE_QUEUE], "c", 10, 0):
        queue.add(entry, entry.submission)
    refusal = Refusal(429, "queue_full", "full", 1.0)
    assert queue.refuse(M, refusal, keep=3).count == 3
    assert queue.refuse(M, refusal, arrived_before_s=2.5).count == 1
    assert [m.id for _, m in outbox.sent] == ["r4", "r1", "r2"]  # type: ignore[attr-defined]


def submission(id: str, arrival_s: float = 5.0) -> Submission:
    return Submission(
        id=id,
        model=M,
        front="ipc:///f",
        arrival_s=arrival_s,
        prompt_tokens=10,
        max_new_tokens=1,
        slo_ttft_s=1.0,
        slo_tpot_s=0.1,
        max_wait_s=9.0,
        late="serve",
        payload=b"",
    )


def test_only_routed_instances_are_published_as_ready() -> None:
    placement = PlacementBook(open_store("memory://"))
    placement.ordered(Activate(key(1), whole_model([D]), REASON), 0.0)
    assert [r.state for r in placement.replicas(M)] == ["loading"]
    placement.note(ActivationFinished(key(1), 0.1), 1.0)
    assert [r.state for r in placement.replicas(M)] == ["draining"], "no route yet"
    placement.route(M, (D,), 1.0)
    assert [r.state for r in placement.replicas(M)] == ["ready"]
    placement.ordered(Deactivate(key(1), whole_model([D]), False, REASON), 2.0)
    assert placement.expects(InstanceLost(key(1)))
    placement.note(DeactivationFinished(key(1)), 3.0)
    assert placement.replicas(M) == []


def test_of_an_instance_that_was_found_loading_no_answer_comes() -> None:
    placement = PlacementBook(open_store("memory://"))
    begins, serves = (InstanceFound(key(1), whole_model([D]), loading=loading) for loading in (True, False))
    assert not placement.expects(begins)
    placement.note(begins, 0.0)
    assert [r.state for r in placement.replicas(M)] == ["loading"]
    assert not placement.expects(serves) and not placement.expects(InstanceLost(key(1)))
    placement.note(serves, 1.0)
    assert placement.expects(serves)
    placement.ordered(Activate(key(2), whole_model([D]), REASON), 2.0)
    assert placement.expects(InstanceFound(key(2), whole_model([D]), loading=True))


def test_a_lost_node_takes_its_instances_along() -> None:
    placement = PlacementBook(open_store("memory://"))
    placement.note(InstanceFound(key(1), whole_model([D])), 0.0)
    placement.note(InstanceFound(key(2), whole_model([DeviceId("n2/host:0")])), 0.0)
    placement.note(NodeLost(NodeId("n1")), 1.0)
    assert [r.generation for r in placement.replicas(M)] == [2]
