"""Three machines' agents and the controller's orders: a pipeline forms by what each has, breaks, and forms again.

The agents ask each other over real weight servers; engines are fakes, which are not handed the connections.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from prism.controller.distribution import WeightDistribution
from prism.controller.images import read_images
from prism.controller.nodes import FleetNodes
from prism.controller.orders import Orders
from prism.core.effects import Activate
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.engine.fake import FakeHandle, FakePool, FakeSpeed
from prism.node import live_pairs, live_routes
from prism.node.instances import Instances
from prism.node.layers_network import LayersNetwork
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics
from prism.remote.handing import PREFIX
from prism.transfer.server import TransferServer
from prism.transfer.windows import WindowSources
from prism.wire.commands import ActivateCommand, DeactivateCommand
from prism.wire.messages import AgentReport, CommandResult
from prism.wire.reports import DeviceStatus
from tests.outbox import NotedOutbox
from tests.patience import happens

from .conftest import Bench
from .live_node import HEAD, MODEL

NAMES = ("a", "b", "c")
ALL = set(range(HEAD + 1))


def key_of(name: str) -> InstanceKey:
    return InstanceKey(ModelName("m"), Generation(1 + NAMES.index(name)))


def device_of(name: str) -> DeviceId:
    return DeviceId(f"{name}/host:0")


class Machine:
    """An agent's instances, reached by others over a weight server."""

    def __init__(self, name: str, bench: Bench, folder: Path) -> None:
        self.name = name
        self.server = TransferServer(WindowSources(), "127.0.0.1:0", b"fleet", name)
        self.pool = FakePool(FakeSpeed())
        measures = NodeMeasures(Metrics(CollectorRegistry()), [])
        shells = {device_of(name): bench.shell}
        self.instances = Instances(NodeId(name), self.pool, shells, lambda: None, measures, layers_dir=folder)
        self.instances._live._helpers.network = LayersNetwork(self.server)
        self.instances.start()

    @property
    def handle(self) -> FakeHandle:
        return next(cast(FakeHandle, x.handle) for x in self.instances.all() if x.handle is not None)

    @property
    def begun(self) -> bool:
        return any(x.handle is not None for x in self.instances.all())

    def report(self) -> AgentReport:
        device = DeviceStatus(
            id=device_of(self.name), kind="host", domain="", capacity_bytes=1 << 30, free_bytes=1 << 30
        )
        return AgentReport(
            node=self.name,
            incarnation="one",
            mailbox=self.name,
            devices=[device],
            instances=self.instances.reports(),
            weights=self.server.address,
        )

    async def close(self) -> None:
        self.instances.close()
        self.server.close()
        await self.pool.close()


@dataclass
class World:
    """The machines, the controller's orders to them, and to whom each connection leads, by its token."""

    machines: dict[str, Machine]
    leads_to: dict[str, str]

    def order(self) -> dict[str, asyncio.Task[CommandResult]]:
        """All at once, as one decision."""
        nodes = FleetNodes()
        for machine in self.machines.values():
            nodes.report(machine.report(), 0.0)
        why = because(ReasonCode.OPERATOR)
        live = LiveMode.PIPELINES
        effects = [Activate(key_of(n), whole_model([device_of(n)]), why, live=live) for n in self.machines]
        supplies, _ = WeightDistribution(nodes).supply(effects, {MODEL.name: read_images(MODEL, "")}, 0.0)
        outbox = NotedOutbox()
        orders = Orders(outbox, "controller", nodes)  # type: ignore[arg-type]
        for effect in effects:
            orders.activate(effect, MODEL, supplies[effect.key], 0.0)
        sent = {mailbox: message for mailbox, message in outbox.sent if isinstance(message, ActivateCommand)}
        return {n: asyncio.create_task(self.machines[n].instances.command(sent[n])) for n in self.machines}

    async def leave(self, name: str) -> CommandResult:
        """It is told to leave."""
        order = DeactivateCommand(command=f"down {name}", reply_to="", key=key_of(name), carry=False)
        return await self.machines[name].instances.command(order)

    def held(self, name: str) -> set[int]:
        state = self.machines[name].handle.remote.state
        assert state is not None
        return set(state.pieces)

    def check_route(self, name: str) -> set[str]:
        """Every piece is run once, in order, by an engine that has it; who they are."""
        route = self.machines[name].handle.remote.routes[-1][0]
        assert [p for stop in route for p in range(stop.first, stop.end)] == sorted(ALL)
        peers = set()
        for stop in route:
            there = self.leads_to[stop.path.removeprefix(PREFIX)] if stop.path else name
            assert set(range(stop.first, stop.end)) <= self.held(there)
            peers |= {there} - {name}
        return peers


@pytest.fixture
async def world(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(live_pairs, "AGAIN_S", 0.0)
    monkeypatch.setattr(live_pairs, "PIPELINE_S", 0.01)
    made = World({}, {})

    def hand_over(path: Path, sock: socket.socket, label: str, token: str = "") -> None:
        if token:
            made.leads_to[token] = label.partition("/")[0]

    monkeypatch.setattr(live_routes, "hand_over", hand_over)
    for name in NAMES:
        (folder := tmp_path / name).mkdir()
        made.machines[name] = Machine(name, bench, folder)
    yield made
    for machine in made.machines.values():
        await machine.close()


async def test_those_of_a_pipeline_are_connected_before_they_have_all_layers(world: World) -> None:
    coming = world.order()
    await happens(lambda: len(world.leads_to) == 6, "connections between all three, both ways")
    assert not any(task.done() for task in coming.values())
    for turn, name in enumerate(NAMES):
        for piece in sorted(ALL)[2 + turn : HEAD : 3]:
            world.machines[name].handle.remote.arrive(piece)
    assert all([(await task).early for task in coming.values()])
    for name in NAMES:
        world.check_route(name)
    assert len(world.leads_to) == 6, "their routes lead over these"


async def test_who_waits_for_a_pipeline_hears_of_the_last_layer_when_it_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own engine and of other machines: nobody waits for the next look."""
    monkeypatch.setattr(live_pairs, "PIPELINE_S", 1e6)
    coming = world.order()
    await happens(lambda: len(world.leads_to) == 6, "connections between all three, both ways")
    for turn, name in enumerate(NAMES):
        for piece in sorted(ALL)[2 + turn : HEAD : 3]:
            world.machines[name].handle.remote.arrive(piece)
    assert all([(await task).early for task in coming.values()])


async def test_who_is_told_to_leave_while_it_waits_for_its_pipeline_leaves_and_the_others_go_on(world: World) -> None:
    """It waited for layers that might have come minutes later, and kept its device's memory until then."""
    coming = world.order()
    await happens(lambda: all(m.begun and m.handle.remote.grows for m in world.machines.values()), "their engines")
    assert (await world.leave("c")).ok
    assert not world.machines["c"].instances.all() and (await coming.pop("c")).ok
    for turn, name in enumerate(("a", "b")):
        for piece in sorted(ALL)[2 + turn : HEAD : 2]:
            world.machines[name].handle.remote.arrive(piece)
    assert all([(await task).early for task in coming.values()])
    for name, other in (("a", "b"), ("b", "a")):
        assert world.check_route(name) == {other}


@pytest.mark.parametrize("seed", range(3))
async def test_a_pipeline_of_three_forms_breaks_and_forms_again(world: World, seed: int) -> None:
    """Whatever comes when: nobody serves before all layers are somewhere, and then over whoever has them."""
    chance = random.Random(seed)
    coming = world.order()
    await happens(lambda: all(m.begun and m.handle.remote.grows for m in world.machines.values()), "their engines")
    orders = {name: list(machine.handle.remote.order) for name, machine in world.machines.items()}
    assert all(set(order[:3]) == {0, 1, HEAD} for order in orders.values())
    assert len({order[3] for order in orders.values()}) == 3, "each begins with another layer"
    todo = [(name, piece) for name, order in orders.items() for piece in order[3:5]]
    chance.shuffle(todo)
    for name, piece in todo[:-1]:
        world.machines[name].handle.remote.arrive(piece)
    has = set().union(*(world.held(name) for name in NAMES))
    if has != ALL:
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in coming.values())
    name, piece = todo[-1]
    world.machines[name].handle.remote.arrive(piece)
    results = [await task for task in coming.values()]
    assert all(result.ok and result.early for result in results)
    for name in NAMES:
        assert world.check_route(name)

    lost = world.machines["c"]
    lost.server.close()
    lost.handle.kill()
    left = [world.machines[name] for name in ("a", "b")]
    for machine in left:
        machine.handle.remote.lose_peers()
    missing = sorted(ALL - world.held("a") - world.held("b"))
    routes = [len(machine.handle.remote.routes) for machine in left]
    for piece in missing:
        chance.choice(left).handle.remote.arrive(piece)
    for machine, before in zip(left, routes, strict=True):
        await happens(lambda m=machine, n=before: len(m.handle.remote.routes) > n, "a route without the lost one")
        assert world.check_route(machine.name) == {"a", "b"} - {machine.name}
