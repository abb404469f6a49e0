"""Several machines on fake engines, their mailboxes on loopback with real keys: joining, leaving, dying."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prism.controller.admin import CommandRefused
from prism.core.events import OperatorLoad
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.engine.fake import FakePool
from prism.node.agent import NodeAgent
from prism.wire.secret import FleetSecret
from tests.patience import PATIENCE_S, happens

from .fake_system import MIB, SPEED, Answer, System, ended, fake_system, model, some_tokens, start_agent, whole

KEYS = FleetSecret("the secret of these tests").mail_keys()
A = ModelName("a")


@asynccontextmanager
async def fleet(folder: Path, *more: str, weight_bytes: int = 60 * MIB) -> AsyncIterator[System]:
    """The machine "local" and those named, and a model that fits once on a device."""
    async with fake_system(folder, [model("a", weight_bytes)], KEYS) as system:
        for name in more:
            join(system, folder, name)
        await joined(system, 1 + len(more))
        yield system


async def joined(system: System, machines: int) -> None:
    await happens(lambda: len(system.controller.nodes.all()) == machines, f"a fleet of {machines}")


def join(system: System, folder: Path, name: str) -> NodeAgent:
    pool = FakePool(SPEED, keys=KEYS)
    agent = start_agent(system.store, folder, pool, name, len(system.agents), name, KEYS)
    system.pools.append(pool)
    system.agents.append(agent)
    system.tasks[name] = asyncio.create_task(agent.run())
    return agent


async def load_on(system: System, *devices: str) -> None:
    await system.controller.admin._introduced(A)
    system.controller.feed(OperatorLoad(A, tuple(devices)))  # type: ignore[arg-type]
    await happens(lambda: system.controller.placement.route_of(A), "a route")
    await system.controller.placement.published()


async def under_way(system: System, device: str, requests: int, tokens: int) -> list[Answer]:
    """So many answers of the model on ``device``, none of which has ended unless nothing else could run meanwhile."""
    await load_on(system, device)
    answers = [await system.front.ask("a", tokens) for _ in range(requests)]
    await some_tokens(answers)
    return answers


async def kill(system: System, name: str) -> None:
    """The machine is gone: its engines, its agent, its connections. Nobody says goodbye."""
    index = next(i for i, a in enumerate(system.agents) if a.node == name)
    for handle in system.pools[index].handles:
        handle._end()
    system.tasks[name].cancel()
    await asyncio.gather(system.tasks[name], return_exceptions=True)
    system.agents[index].inbox.close()


async def known_to_be_busy(system: System, answers: list[Answer]) -> None:
    """The controller has heard that requests run (unless they end before): what leaves gets a new place first."""

    def heard() -> bool:
        system.agents[-1]._changed.set()  # it reports
        return any(instance.busy for instance in system.controller.scheduler.books.loaded.values())

    await happens(lambda: heard() or all(a.ended.is_set() for a in answers), "a report of requests that run")


async def all_report(system: System) -> None:
    """Every machine has reported anew."""
    before = {node.id: node.seen_s for node in system.controller.nodes.all()}
    nodes = system.controller.nodes
    await happens(lambda: all(node.seen_s > before[node.id] for node in nodes.all()), "a report of each machine")


async def test_requests_are_answered_by_another_machine(tmp_path: Path) -> None:
    async with fleet(tmp_path, "b") as system:
        await load_on(system, "b/host:1")
        answer = await system.front.ask("a")
        await ended(answer)
        assert whole(answer)
        assert [h.devices for h in system.engines("a")] == [("b/host:1",)]
        await system.empty()


async def test_a_machine_that_dies_in_mid_answer_costs_no_token(tmp_path: Path) -> None:
    async with fleet(tmp_path, "b") as system:
        answers = await under_way(system, "b/host:0", 8, tokens=200)
        await kill(system, "b")
        unread = await system.front.ask("a")  # by a front door that does not know yet
        await ended(*answers, unread)
        assert all(whole(a) for a in [*answers, unread])
        assert [n.id for n in system.controller.nodes.all()] == ["local"]
        await system.empty()


@pytest.mark.parametrize("heard", [False, True])
async def test_a_machine_that_leaves_hands_everything_over(tmp_path: Path, heard: bool) -> None:
    """Whether or not the controller has ``heard`` that it has requests."""
    async with fleet(tmp_path, "b") as system:
        answers = await under_way(system, "b/host:0", 4, tokens=300)
        if heard:
            await known_to_be_busy(system, answers)
        leaving = system.agents[-1]
        async with asyncio.timeout(PATIENCE_S):
            await leaving.leave()
        assert not leaving.instances.all()
        await ended(*answers)
        assert all(whole(a) for a in answers)
        await joined(system, 1)
        assert [r.node for r in await system.store.agents()] == [NodeId("local")]
        await system.empty()


async def test_a_machine_that_was_taken_for_dead_stops_what_runs_elsewhere(tmp_path: Path) -> None:
    async with fleet(tmp_path, "b") as system:
        answers = await under_way(system, "b/host:0", 3, tokens=400)
        agent = system.agents[-1]
        await system.controller.rescue._empty(agent.devices[0].id)  # as if it had been silent
        await agent._keep(agent.devices[0].id, agent.shells[agent.devices[0].id])
        await ended(*answers)
        assert all(whole(a) for a in answers)
        await system.empty()


async def test_so_many_instances_as_asked_for_and_there_is_room(tmp_path: Path) -> None:
    async with fleet(tmp_path, "b", "c") as system:
        result = await system.controller.admin._load_many(A, 5, deadline_s=1e12)
        assert (result["instances"], result["wanted"], result["failed"]) == (5, 5, [])
        assert len({h.devices for h in system.engines("a")}) == 5
        again = await system.controller.admin._load_many(A, 7, deadline_s=1e12)
        assert again["instances"] == 6  # there are six devices
        await all_report(system)  # what was asked for stays
        await all_report(system)
        assert len(system.engines("a")) == 6


async def test_a_move_that_others_make_room_for_is_waited_for(tmp_path: Path) -> None:
    async with fake_system(tmp_path, [model("a", 60 * MIB), model("b", 60 * MIB)], KEYS) as system:
        await joined(system, 1)
        admin, first, second = system.controller.admin, DeviceId("local/host:0"), DeviceId("local/host:1")
        await admin._load(A, (first,), deadline_s=1e12)
        await admin._load(ModelName("b"), (second,), deadline_s=1e12)
        refused = 0
        while True:
            try:
                moved = await admin._load(A, (second,), deadline_s=1e12)
                break
            except CommandRefused as error:  # the other one has only just come
                assert "stays on local/host:0: local/host:1 is drained, or has no room" in str(error)
                assert system.controller.placement.route_of(A) == (first,)
                refused += 1
                await asyncio.sleep(0.1)
        assert refused and "was_ready" not in moved
        assert second in system.controller.placement.route_of(A)
        assert (await admin._load(A, (second,), deadline_s=1e12))["was_ready"]


async def test_a_late_joiner_serves(tmp_path: Path) -> None:
    async with fleet(tmp_path, weight_bytes=90 * MIB) as system:
        assert (await system.controller.admin._load_many(A, 3, deadline_s=1e12))["instances"] == 2
        join(system, tmp_path, "b")
        while len(await system.store.agents()) < 2:
            await asyncio.sleep(0)
        assert len(system.controller.nodes.all()) == 1, "its first report is waited for"
        assert (await system.controller.admin._load_many(A, 3, deadline_s=1e12))["instances"] == 3
