"""Instances that serve before their weights are there: who runs their layers, on fake engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.settings import LiveMode
from prism.engine.errors import OrderRefused
from prism.engine.fake import FakeHandle, FakePool, FakeSpeed
from prism.node import live_pairs
from prism.node.instances import Instances
from prism.node.layers_network import LayersOffer, LayersWanted
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics
from prism.remote.handing import PREFIX
from prism.remote.orders import RouteStop
from prism.wire.messages import ActivateCommand, CommandResult, DeactivateCommand
from tests.integration.fake_system import SHAPE, model
from tests.patience import happens

from .conftest import DEVICE, Bench

MODEL = replace(model("m"), shape=replace(SHAPE, layers=6))
HEAD = MODEL.shape.layers + 1
FIRST, SECOND, THIRD, FOURTH = (InstanceKey(ModelName("m"), Generation(n)) for n in (1, 2, 3, 4))


class Pairs:
    """A node whose instances may serve early."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.pool = FakePool(FakeSpeed())
        measures = NodeMeasures(Metrics(self.registry), [])
        shells = {DEVICE: bench.shell}
        self.instances = Instances(NodeId("local"), self.pool, shells, lambda: None, measures, layers_dir=folder)
        bench.on_emptied = self.instances.note_emptied

    async def activate(
        self,
        key: InstanceKey,
        live: LiveMode,
        devices: Sequence[DeviceId] = (DEVICE,),
        peers: Mapping[str, str] | None = None,
    ) -> FakeHandle:
        command = ActivateCommand(
            command=f"up {key}",
            reply_to="",
            key=key,
            parts=whole_model(devices),
            spec=MODEL,
            reason="test",
            live=live,
            peers=dict(peers or {}),
        )
        assert (await self.instances.command(command)).ok
        return self.handle(key)

    async def deactivate(self, key: InstanceKey) -> CommandResult:
        order = DeactivateCommand(command=f"down {key}", reply_to="", key=key, carry=True)
        return await self.instances.command(order)

    def handle(self, key: InstanceKey) -> FakeHandle:
        return next(cast(FakeHandle, x.handle) for x in self.instances.all() if x.key == key)


@pytest.fixture
async def pairs(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pairs]:
    monkeypatch.setattr(live_pairs, "AGAIN_S", 0.0)
    made = Pairs(bench, tmp_path)
    yield made
    made.instances.close()
    await made.pool.close()


def over(peer: FakeHandle) -> tuple[RouteStop, ...]:
    """The route of an engine whose layers but the first run at ``peer``."""
    return RouteStop("", 0, 2), RouteStop(str(peer.remote.served_at), 2, HEAD), RouteStop("", HEAD, HEAD + 1)


async def test_a_further_instance_serves_early_over_the_first_and_then_alone(pairs: Pairs) -> None:
    first = await pairs.activate(FIRST, LiveMode.PAIR)
    assert not first.began_with, "there was nobody to run its layers"
    second = await pairs.activate(SECOND, LiveMode.PAIR)
    assert second.began_with == (0, 1, HEAD) and second.remote.grows
    assert second.remote.routes == [(over(first),)]
    report = next(r.remote for r in pairs.instances.reports() if r.key == SECOND)
    assert report is not None and (report.peers, report.held_layers, report.layers) == ([DEVICE], 1, HEAD - 1)
    assert pairs.registry.get_sample_value("prism_live_starts_total", {"model": "m", "device": DEVICE}) == 1
    second.remote.arrive()
    await happens(lambda: pairs.registry.get_sample_value("prism_live_seconds_count", {"model": "m"}), "it is alone")
    third = await pairs.activate(THIRD, LiveMode.PAIR)
    assert third.began_with == (0, 1, HEAD)
    assert third.remote.routes == [(over(first), over(second))], "the second is there for when the first is lost"


async def test_several_newcomers_are_dealt_to_those_that_have_everything(pairs: Pairs) -> None:
    """Two at two: each has one for itself, and the other one as a fallback; they load from both ends."""
    old = [await pairs.activate(key, LiveMode.WHOLE) for key in (FIRST, SECOND)]
    new = await asyncio.gather(*(pairs.activate(key, LiveMode.PAIR) for key in (THIRD, FOURTH)))
    routes = [handle.remote.routes[0] for handle in new]
    assert set(routes) == {(over(old[0]), over(old[1])), (over(old[1]), over(old[0]))}
    assert sorted(handle.remote.downwards for handle in new) == [False, True]


async def test_newcomers_whose_peer_is_gone_run_what_they_have_for_each_other(pairs: Pairs) -> None:
    await pairs.activate(FIRST, LiveMode.WHOLE)
    up, down = [await pairs.activate(key, LiveMode.PAIR) for key in (SECOND, THIRD)]
    assert (up.remote.downwards, down.remote.downwards) == (False, True)
    middle = HEAD // 2
    up.remote.arrive(*range(2, middle + 1))
    down.remote.arrive(*range(middle + 1, HEAD))
    assert (await pairs.deactivate(FIRST)).ok
    for handle in (up, down):
        handle.remote.lose_peers()
    await happens(lambda: len(up.remote.routes) == len(down.remote.routes) == 2, "other routes")
    rest = RouteStop(str(down.remote.served_at), middle + 1, HEAD)
    assert up.remote.routes[1] == ((RouteStop("", 0, middle + 1), rest, RouteStop("", HEAD, HEAD + 1)),)
    rest = RouteStop(str(up.remote.served_at), 2, middle + 1)
    assert down.remote.routes[1] == ((RouteStop("", 0, 2), rest, RouteStop("", middle + 1, HEAD + 1)),)


async def test_off_is_off(pairs: Pairs) -> None:
    await pairs.activate(FIRST, LiveMode.WHOLE)
    assert not (await pairs.activate(SECOND, LiveMode.WHOLE)).began_with
    assert pairs.handle(FIRST).remote.served_at is None


async def test_one_that_cannot_run_layers_for_others_is_no_peer(pairs: Pairs) -> None:
    first = await pairs.activate(FIRST, LiveMode.PAIR)
    first.remote.refuses = "layers in other engines together with LoRA adapters"
    assert not (await pairs.activate(SECOND, LiveMode.PAIR)).began_with


async def test_an_engine_whose_peer_is_gone_gets_another_one(pairs: Pairs) -> None:
    first, second = [await pairs.activate(key, LiveMode.WHOLE) for key in (FIRST, SECOND)]
    third = await pairs.activate(THIRD, LiveMode.PAIR)
    assert third.remote.routes == [(over(first), over(second))]
    assert (await pairs.deactivate(FIRST)).ok
    third.remote.lose_peers()
    await happens(lambda: len(third.remote.routes) == 2, "another route")
    assert third.remote.routes[1] == (over(second),) and third.remote.grows


async def test_one_that_loads_itself_runs_no_layers_for_others(pairs: Pairs) -> None:
    first = await pairs.activate(FIRST, LiveMode.PAIR)
    second = await pairs.activate(SECOND, LiveMode.PAIR)
    first.kill()
    await happens(lambda: FIRST not in [x.key for x in pairs.instances.all()], "the first is gone")
    assert second.began_with and not (await pairs.activate(THIRD, LiveMode.PAIR)).began_with


class FakeNetwork:
    """Another machine, ``b``, whose engine takes what it is given."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.offered: LayersOffer | None = None
        self.asked: list[LayersWanted] = []

    def offer(self, offer: LayersOffer) -> None:
        self.offered = offer

    def least_busy(self, addresses: Mapping[str, str], wanted: LayersWanted) -> tuple[str, str] | None:
        self.asked.append(wanted)
        return next(iter(addresses.items()), None)

    def connect(self, node: str, address: str, wanted: LayersWanted) -> tuple[DeviceId, socket.socket]:
        return DeviceId(f"{node}/host:3"), self.ours


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """What engines were handed: where, the other end, whether for a route."""
    noted: list[tuple[str, str, bool]] = []

    def hand_over(path: Path, sock: socket.socket, label: str, token: str = "") -> None:
        noted.append((path.name, label, bool(token)))

    monkeypatch.setattr(live_pairs, "hand_over", hand_over)
    return noted


async def test_an_engine_without_one_of_its_machine_leads_over_one_of_another(
    pairs: Pairs, given: list[tuple[str, str, bool]]
) -> None:
    network = FakeNetwork()
    pairs.instances._live._network = network  # type: ignore[assignment]
    leader = await pairs.activate(FIRST, LiveMode.PAIR, peers={"b": "10.0.0.2:7"})
    assert leader.began_with == (0, 1, HEAD) and leader.remote.grows
    assert network.asked[0] == LayersWanted("m", DEVICE)
    ((route,),) = leader.remote.routes
    assert route[1].path.startswith(PREFIX)
    assert given == [(f"layers-{leader.workers[0]}.sock", "b/host:3", True)]
    network.theirs.close()


async def test_a_machine_gives_connections_to_its_least_busy_engine(
    pairs: Pairs, given: list[tuple[str, str, bool]]
) -> None:
    network = FakeNetwork()
    pairs.instances._live._network = network  # type: ignore[assignment]
    pairs.instances.start()
    assert network.offered is not None
    wanted = LayersWanted("m", "a/host:1")
    with pytest.raises(OrderRefused, match="no engine here has all of m"):
        network.offered.requests(wanted)
    with pytest.raises(OrderRefused, match="no engine here runs layers of m"):
        await network.offered.take(wanted, network.theirs)
    first = await pairs.activate(FIRST, LiveMode.WHOLE)
    assert network.offered.requests(wanted) == 0
    assert await network.offered.take(wanted, network.theirs) == DEVICE
    assert given == [(f"layers-{first.workers[0]}.sock", "a/host:1", False)]
    network.ours.close()
    network.theirs.close()
