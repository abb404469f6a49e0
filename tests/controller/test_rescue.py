"""Requests in the queues of machines that are gone, and what else the store keeps of these."""

from __future__ import annotations

from prism.controller.nodes import LOST_AFTER_S, FleetNodes
from prism.controller.rescue import FORGET_S, SILENT_S, UNHEARD_S, Rescue
from prism.controller.versions import Versions
from prism.core.ids import DeviceId, NodeId
from prism.store.connect import open_store
from prism.store.values import AgentRecord
from prism.wire import keys
from prism.wire.messages import Submission, decode, encode
from tests.controller.test_fleet import M, fleet, report


async def submit(store: object, queue: str, name: str) -> None:
    submission = Submission(
        id=name,
        model=M,
        front="ipc:///f",
        arrival_s=0.0,
        prompt_tokens=1,
        max_new_tokens=1,
        slo_ttft_s=1.0,
        slo_tpot_s=1.0,
        max_wait_s=1.0,
        late="serve",
        payload=b"",
    )
    await store.add(queue, name, encode(submission))  # type: ignore[attr-defined]


def record(node: str, seen_s: float) -> AgentRecord:
    return AgentRecord(node=NodeId(node), mailbox="tcp://x:1", devices=[DeviceId(f"{node}/host:0")], seen_s=seen_s)


async def test_requests_of_a_lost_machine_go_to_the_inactive_queue() -> None:
    store = open_store("memory://")
    queue = keys.device_queue("b/host:0")
    await submit(store, queue, "read")
    await store.read_new([queue], "agent-b", 10, 0.0)
    await submit(store, queue, "unread")
    nodes, _ = fleet(report("a"), report("b"))
    rescue = Rescue(store, "controller")
    await rescue.look(nodes, Versions(), 0.0)
    assert await store.lengths([queue]) == [2]
    for s in range(1, int(LOST_AFTER_S) + 2):
        nodes.silent(float(s))
    nodes.report(report("a"), LOST_AFTER_S + 1)
    await rescue.look(nodes, Versions(), LOST_AFTER_S + 1)
    assert await store.lengths([queue, keys.INACTIVE_QUEUE]) == [0, 2]
    entries = await store.read_new([keys.INACTIVE_QUEUE], "controller", 10, 0.0)
    assert {decode(e.data).hops for e in entries} == {1}  # type: ignore[union-attr]


async def test_a_new_controller_rescues_what_nobody_has_announced_for_long() -> None:
    """By its own clock: the machine's may be wrong by hours."""
    store = open_store("memory://")
    queue = keys.device_queue("b/host:0")
    await submit(store, queue, "r")
    await store.announce_agent(record("b", 9e9))
    rescue, nobody = Rescue(store, "controller"), FleetNodes()
    for now_s in (0.0, UNHEARD_S / 2, UNHEARD_S):
        await rescue.look(nobody, Versions(), now_s)
    assert await store.lengths([queue]) == [1]
    await store.announce_agent(record("b", 9e9 + 1))  # it lives, its report has not come yet
    await rescue.look(nobody, Versions(), UNHEARD_S + 1)
    assert await store.lengths([queue]) == [1]
    await rescue.look(nobody, Versions(), 2 * UNHEARD_S + 2)
    assert await store.lengths([queue, keys.INACTIVE_QUEUE]) == [0, 1]
    await rescue.look(nobody, Versions(), 2 * UNHEARD_S + FORGET_S)
    assert await store.agents() == []


async def test_what_the_store_keeps_of_a_machine_goes_with_it() -> None:
    store = open_store("memory://")
    forgotten: list[str] = []

    async def note(queue: str) -> None:
        forgotten.append(queue)

    store.forget = note  # type: ignore[method-assign, assignment]
    nodes, _ = fleet(report("a"), report("b"))
    rescue = Rescue(store, "controller")
    await rescue.look(nodes, Versions(), 0.0)
    nodes.report(report("b", left=True), 1.0)
    await rescue.look(nodes, Versions(), FORGET_S)
    assert forgotten == []
    await rescue.look(nodes, Versions(), FORGET_S + 1)
    assert forgotten == [keys.device_queue("b/host:0")]


async def test_a_machine_is_silent_from_when_it_was_last_heard_of() -> None:
    store, (nodes, _) = open_store("memory://"), fleet(report("a"))
    rescue, a, b = Rescue(store, "controller"), record("a", 1.0), record("b", 1.0)
    await store.announce_agent(a)
    await store.announce_agent(b)
    assert not rescue.is_silent(b, 9e9), "nobody has looked yet"
    await rescue.look(nodes, Versions(), 0.0)
    assert not rescue.is_silent(b, SILENT_S)
    await rescue.look(nodes, Versions(), SILENT_S + 1)
    assert rescue.is_silent(b, SILENT_S + 1)
    assert not rescue.is_silent(a, SILENT_S + 1), "it reports"
    assert not rescue.is_silent(record("b", 2.0), SILENT_S + 1), "it has just come back"
    nodes.report(report("a", left=True), SILENT_S + 1)
    await rescue.look(nodes, Versions(), SILENT_S + 2)
    assert rescue.is_silent(a, 2 * SILENT_S + 1.5), "what it announced before is no news of it"
