"""Instances that serve before their weights are there: who runs their layers, on fake engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from prism.core.ids import DeviceId, Generation, ModelName, NodeId, node_of
from prism.core.instances import InstanceKey, whole_model
from prism.core.settings import LiveMode
from prism.engine.errors import OrderRefused
from prism.engine.fake import FakeHandle, FakePool, FakeSpeed
from prism.node import live_pairs, live_routes
from prism.node.instances import Instances
from prism.node.layers_network import HeldElsewhere, HeldPieces, Holders, LayersOffer, LayersWanted
from prism.node.live_helpers import held_pieces
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics
from prism.policy.live.routes import layer_order
from prism.remote.handing import PREFIX
from prism.remote.orders import RouteStop
from prism.wire.messages import ActivateCommand, CommandResult, Companion, DeactivateCommand
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
        **further: Any,
    ) -> FakeHandle:
        command = self.order(key, live, devices, peers, **further)
        assert (await self.instances.command(command)).ok
        return self.handle(key)

    @staticmethod
    def order(
        key: InstanceKey,
        live: LiveMode,
        devices: Sequence[DeviceId] = (DEVICE,),
        peers: Mapping[str, str] | None = None,
        **further: Any,
    ) -> ActivateCommand:
        return ActivateCommand(
            command=f"up {key}",
            reply_to="",
            key=key,
            parts=whole_model(devices),
            spec=MODEL,
            reason="test",
            live=live,
            peers=dict(peers or {}),
            **further,
        )

    async def deactivate(self, key: InstanceKey) -> CommandResult:
        order = DeactivateCommand(command=f"down {key}", reply_to="", key=key, carry=True)
        return await self.instances.command(order)

    def handle(self, key: InstanceKey) -> FakeHandle:
        return next(cast(FakeHandle, x.handle) for x in self.instances.all() if x.key == key)


@pytest.fixture
async def pairs(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pairs]:
    monkeypatch.setattr(live_pairs, "AGAIN_S", 0.0)
    monkeypatch.setattr(live_pairs, "PIPELINE_S", 0.01)
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
    assert sorted(tuple(handle.remote.order) for handle in new) == sorted(layer_order(6, turn, 2) for turn in (0, 1))


async def test_newcomers_whose_peer_is_gone_run_what_they_have_for_each_other(pairs: Pairs) -> None:
    await pairs.activate(FIRST, LiveMode.WHOLE)
    up, down = [await pairs.activate(key, LiveMode.PAIR) for key in (SECOND, THIRD)]
    assert (up.remote.order, down.remote.order) == (layer_order(6, 0, 2), layer_order(6, 1, 2))
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


async def test_an_engine_that_has_everything_is_not_made_to_begin_again(pairs: Pairs) -> None:
    """Its peer is gone, and it has not gone on alone yet: a route would cost its requests what they have."""
    await pairs.activate(FIRST, LiveMode.WHOLE)
    leader = await pairs.activate(SECOND, LiveMode.PAIR)
    assert leader.remote.state is not None
    all_here = list(range(HEAD + 1))
    leader.remote.state = msgspec.structs.replace(leader.remote.state, pieces=all_here, alone=False, peers=[])
    await asyncio.sleep(0.3)
    assert len(leader.remote.routes) == 1


async def test_one_that_loads_itself_runs_no_layers_for_others(pairs: Pairs) -> None:
    first = await pairs.activate(FIRST, LiveMode.PAIR)
    second = await pairs.activate(SECOND, LiveMode.PAIR)
    first.kill()
    await happens(lambda: FIRST not in [x.key for x in pairs.instances.all()], "the first is gone")
    assert second.began_with and not (await pairs.activate(THIRD, LiveMode.PAIR)).began_with


class FakeNetwork:
    """Another machine, ``b``, whose engine takes what it is given."""

    def __init__(self, *held: HeldPieces) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.offered: LayersOffer | None = None
        self.asked: list[tuple[set[str], LayersWanted]] = []
        self.looked = 0
        """How often somebody has, while others wait for their pipeline."""
        self.held = list(held)
        self.connected: list[InstanceKey] = []

    def offer(self, offer: LayersOffer) -> None:
        self.offered = offer

    def holders(self, addresses: Mapping[str, str], wanted: LayersWanted) -> list[HeldElsewhere]:
        self.asked.append((set(addresses), wanted))
        there = [(node_of(DeviceId(held.device)), held) for held in self.held]
        return [HeldElsewhere(node, addresses[node], held) for node, held in there if node in addresses]

    async def watch(self, node: str, address: str, wanted: LayersWanted, tell: Callable[[Holders], None]) -> None:
        told: Holders | None = None
        while True:
            found = [HeldElsewhere(node, address, x) for x in self.held if node_of(DeviceId(x.device)) == node]
            if found != told:
                told = found
                tell(found)
            await asyncio.sleep(0.002)
            self.looked += 1

    def connect(self, there: HeldElsewhere, wanted: LayersWanted) -> tuple[DeviceId, socket.socket]:
        self.connected.append(there.held.key)
        return DeviceId(there.held.device), self.ours.dup()

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


def held(node: str, key: InstanceKey, *pieces: int) -> HeldPieces:
    """All pieces, if none are named."""
    device = DeviceId(f"{node}/host:3")
    there = list(pieces or range(HEAD + 1))
    return HeldPieces(key=key, device=device, pieces=there, led_pieces=0, requests=0)


@pytest.fixture
def networked(pairs: Pairs) -> Iterator[FakeNetwork]:
    network = FakeNetwork()
    pairs.instances._live._helpers.network = network  # type: ignore[assignment]
    yield network
    network.close()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, bool]]:
    """What engines were handed: where, the other end, whether for a route."""
    noted: list[tuple[str, str, bool]] = []

    def hand_over(path: Path, sock: socket.socket, label: str, token: str = "") -> None:
        noted.append((path.name, label, bool(token)))

    monkeypatch.setattr(live_routes, "hand_over", hand_over)
    return noted


async def test_an_engine_without_one_of_its_machine_leads_over_one_of_another(
    pairs: Pairs, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    networked.held = [held("b", SECOND)]
    leader = await pairs.activate(FIRST, LiveMode.PAIR, peers={"b": "10.0.0.2:7"})
    assert leader.began_with == (0, 1, HEAD) and leader.remote.grows
    assert networked.asked[0] == ({"b"}, LayersWanted("m", DEVICE))
    ((route,),) = leader.remote.routes
    assert route[1].path.startswith(PREFIX) and (route[1].first, route[1].end) == (2, HEAD)
    assert given == [(f"layers-{leader.workers[0]}.sock", "b/host:3", True)]


def ordered_with(
    *companions: InstanceKey, there: Sequence[InstanceKey] = (), apart: Sequence[InstanceKey] = ()
) -> dict[str, Any]:
    """Of an order: instances on machines of their own, in its pipeline (``apart``: in another one), and others that
    were there before."""
    coming = [Companion(key=key, device=f"n{key.generation}/host:3", pipeline=int(key in apart)) for key in companions]
    before = [Companion(key=key, device=f"n{key.generation}/host:3") for key in there]
    peers = {f"n{key.generation}": f"10.0.0.{key.generation}:7" for key in (*companions, *there)}
    return {"companions": coming + before, "turns": 1 + len(companions), "peers": {**peers, "far": "10.0.0.99:7"}}


async def test_a_pipeline_over_machines_serves_as_soon_as_it_holds_the_model(
    pairs: Pairs, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """Nobody has everything: it waits until the two that come with it have what it lacks, and leads over both."""
    order = pairs.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, THIRD))
    coming = asyncio.create_task(pairs.instances.command(order))
    await happens(lambda: networked.asked, "its company being asked")
    leader = pairs.handle(FIRST)
    assert leader.began_with == (0, 1, HEAD) and leader.remote.order == layer_order(6, 0, 3)
    assert not coming.done() and not leader.remote.routes
    assert all(nodes == {"n2", "n3"} for nodes, _ in networked.asked), "nobody else has a part of it"
    report = next(r for r in pairs.instances.reports() if r.key == FIRST)
    assert report.state == "loading" and report.remote is not None and report.remote.held_layers == 1
    leader.remote.arrive(2)
    networked.held = [held("n2", SECOND, 0, 1, 3, 4, HEAD), held("n3", THIRD, 0, 1, 5, 6, HEAD)]
    result = await coming
    assert result.ok and result.early
    ((route,),) = leader.remote.routes
    assert [(stop.first, stop.end, bool(stop.path)) for stop in route] == [
        *[(0, 3, False), (3, 5, True), (5, HEAD, True), (HEAD, HEAD + 1, False)]
    ]
    assert sorted(networked.connected) == [SECOND, THIRD]
    assert leader.remote.grows and leader.remote.when_whole, "both lead over it, too"


async def test_it_changes_over_to_its_pipeline_and_back_when_that_breaks(
    pairs: Pairs, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """One that has everything runs its layers until its companion has the other half; that dies, and again it does."""
    networked.held = [held("n3", THIRD), held("n2", SECOND, 0, 1, HEAD)]
    leader = await pairs.activate(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, there=[THIRD]))
    assert networked.connected == [THIRD]
    assert leader.remote.grows and not leader.remote.when_whole, "what it takes over relieves that one"
    networked.held = [held("n3", THIRD), held("n2", SECOND, 0, 1, 4, 5, 6, HEAD)]
    leader.remote.arrive(2, 3)
    await happens(lambda: len(leader.remote.routes) == 2, "its changing over")
    assert [[(stop.first, stop.end) for stop in route if stop.path] for route in leader.remote.routes[1]] == [
        [(4, HEAD)],
        [(4, HEAD)],
    ]
    assert sorted(networked.connected[1:]) == [SECOND, THIRD], "the latter for when the former is lost"
    networked.held = [held("n3", THIRD)]
    leader.remote.lose_peers()
    await happens(lambda: len(leader.remote.routes) == 3, "another route")
    assert networked.connected[3:] == [THIRD]


async def test_as_many_begin_over_others_as_there_are_of_these(
    pairs: Pairs, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """All leaning on one would make its steps longer for everybody: the second of its pipeline waits."""
    networked.held = [held("n3", THIRD), held("n2", SECOND, 0, 1, HEAD)]
    order = pairs.order(FIRST, LiveMode.PIPELINES, turn=1, **ordered_with(SECOND, there=[THIRD]))
    coming = asyncio.create_task(pairs.instances.command(order))
    await happens(lambda: networked.looked > 5 and networked.connected, "its looking for routes")
    assert not coming.done() and networked.connected == [SECOND], "ahead of need, and nobody else"
    networked.held = [held("n3", THIRD), held("n2", SECOND, 0, 1, 2, 3, 4, 5, 6, HEAD)]
    assert (await coming).early and networked.connected == [SECOND]
    networked.held = [held("n3", THIRD)]
    pairs.handle(FIRST).remote.lose_peers()
    await happens(lambda: networked.connected[1:] == [THIRD], "one that serves needs some peer")


async def test_it_is_connected_with_all_that_come_with_it_before_it_knows_over_whom_it_will_lead(
    pairs: Pairs, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """The others are for when its pipeline breaks: to connect with them then would make it begin later."""
    networked.held = [held("n2", SECOND, 0, 1, HEAD), held("n3", THIRD, 0, 1, HEAD)]
    order = pairs.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, THIRD, apart=[THIRD]))
    coming = asyncio.create_task(pairs.instances.command(order))
    await happens(lambda: networked.looked > 5 and len(networked.connected) > 1, "its looking for routes")
    assert not coming.done() and sorted(networked.connected) == [SECOND, THIRD]
    networked.held = [held("n2", SECOND, *range(HEAD)), held("n3", THIRD, *range(HEAD))]
    assert (await coming).early and len(networked.connected) == 2, "nobody had to be connected any more"
    own, fallback = ({stop.path for stop in route if stop.path} for route in pairs.handle(FIRST).remote.routes[0])
    assert len(own) == len(fallback) == 1 and own != fallback


@pytest.mark.parametrize("patience_s", [1000.0, 0.0])
async def test_it_waits_a_moment_for_its_own_pipeline_when_another_one_has_all_layers(
    pairs: Pairs,
    networked: FakeNetwork,
    given: list[tuple[str, str, bool]],
    monkeypatch: pytest.MonkeyPatch,
    patience_s: float,
) -> None:
    """The other one's members would run layers for two pipelines."""
    monkeypatch.setattr(live_routes, "PATIENCE_S", patience_s)
    networked.held = [held("n2", SECOND, 0, 1, HEAD), held("n3", THIRD, 0, 1, 2, 3, 4, 5, 6, HEAD)]
    order = pairs.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, THIRD, apart=[THIRD]))
    coming = asyncio.create_task(pairs.instances.command(order))
    await happens(lambda: networked.looked > 50 or networked.connected, "its looking for routes")
    assert networked.connected == ([] if patience_s else [THIRD])
    networked.held = [held("n2", SECOND, 0, 1, 2, 3, 4, 5, 6, HEAD), held("n3", THIRD, 0, 1, HEAD)]
    assert (await coming).early and networked.connected == ([SECOND] if patience_s else [THIRD])


async def test_one_of_a_pipeline_that_gets_all_its_weights_first_needs_nobody(
    pairs: Pairs, networked: FakeNetwork
) -> None:
    order = pairs.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND))
    coming = asyncio.create_task(pairs.instances.command(order))
    await happens(lambda: networked.asked, "its company being asked")
    pairs.handle(FIRST).remote.arrive()
    result = await coming
    assert result.ok and not result.early, "it has all its weights"


async def test_one_whose_engine_cannot_run_layers_apart_comes_whole(pairs: Pairs, networked: FakeNetwork) -> None:
    pairs.pool.refuses_layers = "layers in other engines together with LoRA adapters"
    order = pairs.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND))
    result = await pairs.instances.command(order)
    assert result.ok and not result.early
    assert [(x.came_whole, len(held_pieces(x))) for x in pairs.instances.all()] == [(True, HEAD + 1)]


async def test_an_engine_that_ends_while_it_waits_for_its_pipeline_fails(pairs: Pairs, networked: FakeNetwork) -> None:
    order = pairs.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND))
    coming = asyncio.create_task(pairs.instances.command(order))
    await happens(lambda: networked.asked, "its company being asked")
    pairs.handle(FIRST).kill()
    result = await coming
    assert not result.ok and not list(pairs.instances.all())


async def test_what_other_machines_are_told_and_given(
    pairs: Pairs, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    pairs.instances.start()
    assert networked.offered is not None
    wanted = LayersWanted("m", "a/host:1")
    assert networked.offered.held(wanted) == []
    with pytest.raises(OrderRefused, match="no engine here runs layers of m"):
        await networked.offered.take(wanted, networked.theirs)
    first = await pairs.activate(FIRST, LiveMode.WHOLE)
    second = await pairs.activate(SECOND, LiveMode.PAIR)
    second.remote.arrive(2)
    told = {one.key: (one.pieces, one.led_pieces) for one in networked.offered.held(wanted)}
    assert told == {FIRST: (list(range(HEAD + 1)), HEAD - 3), SECOND: ([0, 1, 2, HEAD], 0)}
    for key, handle in ((FIRST, first), (SECOND, second)):
        mine = msgspec.structs.replace(wanted, key=key)
        assert await networked.offered.take(mine, networked.theirs) == DEVICE
        assert given.pop() == (f"layers-{handle.workers[0]}.sock", "a/host:1", False)
    with pytest.raises(OrderRefused, match="m#4"):
        await networked.offered.take(msgspec.structs.replace(wanted, key=FOURTH), networked.theirs)
