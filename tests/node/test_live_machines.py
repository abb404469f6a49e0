"""Instances that serve before their weights are there: over whom of other machines they lead, alone or in pipelines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prism.core.instances import InstanceKey
from prism.core.settings import LiveMode
from prism.engine.errors import OrderRefused
from prism.node import live_routes
from prism.node.layers_network import LayersWanted
from prism.node.live_helpers import held_pieces
from prism.policy.live.routes import layer_order
from prism.remote.handing import PREFIX
from prism.wire.commands import Companion
from tests.patience import happens

from .conftest import DEVICE, Bench
from .live_node import FIRST, FOURTH, HEAD, SECOND, THIRD, FakeNetwork, LiveNode, held, opened


@pytest.fixture
async def node(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveNode]:
    async with opened(bench, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def networked(node: LiveNode) -> Iterator[FakeNetwork]:
    network = FakeNetwork()
    node.instances._live._helpers.network = network  # type: ignore[assignment]
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


async def test_who_is_asked_what_it_has_listens_before_anybody_connects(
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    whole = await node.activate(FIRST, LiveMode.WHOLE)
    node.instances.start()
    assert networked.offered is not None and whole.remote.served_at is None
    for _ in range(2):
        assert [one.key for one in networked.offered.held(LayersWanted("m", "b/host:3"))] == [FIRST]
    await happens(lambda: whole.remote.served_at is not None, "it listens")
    assert not given


async def test_an_engine_without_one_of_its_machine_leads_over_one_of_another(
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    networked.held = [held("b", SECOND)]
    leader = await node.activate(FIRST, LiveMode.PAIR, peers={"b": "10.0.0.2:7"})
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
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """Nobody has everything: it waits until the two that come with it have what it lacks, and leads over both."""
    order = node.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, THIRD))
    coming = asyncio.create_task(node.instances.command(order))
    await happens(lambda: networked.asked, "its company being asked")
    leader = node.handle(FIRST)
    assert leader.began_with == (0, 1, HEAD) and leader.remote.order == layer_order(6, 0, 3)
    assert not coming.done() and not leader.remote.routes
    assert all(nodes == {"n2", "n3"} for nodes, _ in networked.asked), "nobody else has a part of it"
    report = next(r for r in node.instances.reports() if r.key == FIRST)
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


async def test_one_to_which_embedding_and_head_come_late_runs_layers_before_it_leads(
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """Its engine is there with the first layer; others lead over it meanwhile. It is ready when it can lead itself."""
    networked.held = [held("n2", SECOND, 0, 1, 2, 3, HEAD)]
    order = node.order(FIRST, LiveMode.PIPELINES, leads=False, turn=1, **ordered_with(SECOND))
    coming = asyncio.create_task(node.instances.command(order))
    await happens(lambda: networked.looked > 5 and networked.connected, "its looking for routes")
    runs = node.handle(FIRST)
    assert runs.began_with == (1,) and runs.remote.grows
    runs.remote.arrive(4, 5, 6)
    node.instances.start()
    assert networked.offered is not None
    offered = networked.offered.held(LayersWanted("m", "n2/host:3"))
    assert [(one.key, one.pieces) for one in offered] == [(FIRST, [1, 4, 5, 6])]
    seen = networked.looked
    await happens(lambda: networked.looked > seen + 5, "its looking again")
    assert not coming.done() and not runs.remote.routes, "together they have all layers; it has no embedding"
    runs.remote.arrive(0)
    runs.remote.arrive(HEAD)
    assert (await coming).early
    ((route,),) = runs.remote.routes
    assert [(stop.first, stop.end) for stop in route if stop.path] == [(2, 4)]


async def test_it_changes_over_to_its_pipeline_and_back_when_that_breaks(
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """One that has everything runs its layers until its companion has the other half; that dies, and again it does."""
    networked.held = [held("n3", THIRD), held("n2", SECOND, 0, 1, HEAD)]
    leader = await node.activate(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, there=[THIRD]))
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
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """All leaning on one would make its steps longer for everybody: the second of its pipeline waits."""
    networked.held = [held("n3", THIRD), held("n2", SECOND, 0, 1, HEAD)]
    order = node.order(FIRST, LiveMode.PIPELINES, turn=1, **ordered_with(SECOND, there=[THIRD]))
    coming = asyncio.create_task(node.instances.command(order))
    await happens(lambda: networked.looked > 5 and networked.connected, "its looking for routes")
    assert not coming.done() and networked.connected == [SECOND], "ahead of need, and nobody else"
    networked.held = [held("n3", THIRD), held("n2", SECOND, 0, 1, 2, 3, 4, 5, 6, HEAD)]
    assert (await coming).early and networked.connected == [SECOND]
    networked.held = [held("n3", THIRD)]
    node.handle(FIRST).remote.lose_peers()
    await happens(lambda: networked.connected[1:] == [THIRD], "one that serves needs some peer")


async def test_it_is_connected_with_all_that_come_with_it_before_it_knows_over_whom_it_will_lead(
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    """The others are for when its pipeline breaks: to connect with them then would make it begin later."""
    networked.held = [held("n2", SECOND, 0, 1, HEAD), held("n3", THIRD, 0, 1, HEAD)]
    order = node.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, THIRD, apart=[THIRD]))
    coming = asyncio.create_task(node.instances.command(order))
    await happens(lambda: networked.looked > 5 and len(networked.connected) > 1, "its looking for routes")
    assert not coming.done() and sorted(networked.connected) == [SECOND, THIRD]
    networked.held = [held("n2", SECOND, *range(HEAD)), held("n3", THIRD, *range(HEAD))]
    assert (await coming).early and len(networked.connected) == 2, "nobody had to be connected any more"
    own, fallback = ({stop.path for stop in route if stop.path} for route in node.handle(FIRST).remote.routes[0])
    assert len(own) == len(fallback) == 1 and own != fallback


@pytest.mark.parametrize(("patience_s", "share"), [(1000.0, 0.0), (0.0, 1e6), (0.0, 0.0)])
async def test_it_waits_a_moment_for_its_own_pipeline_when_another_one_has_all_layers(
    node: LiveNode,
    networked: FakeNetwork,
    given: list[tuple[str, str, bool]],
    monkeypatch: pytest.MonkeyPatch,
    patience_s: float,
    share: float,
) -> None:
    """The other one's members would run layers for two pipelines. The longer it has loaded, the longer it waits."""
    monkeypatch.setattr(live_routes, "PATIENCE_S", patience_s)
    monkeypatch.setattr(live_routes, "PATIENCE_SHARE", share)
    waits = patience_s or share
    networked.held = [held("n2", SECOND, 0, 1, HEAD), held("n3", THIRD, 0, 1, 2, 3, 4, 5, 6, HEAD)]
    order = node.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND, THIRD, apart=[THIRD]))
    coming = asyncio.create_task(node.instances.command(order))
    await happens(lambda: networked.looked > 50 or networked.connected, "its looking for routes")
    assert networked.connected == ([] if waits else [THIRD])
    networked.held = [held("n2", SECOND, 0, 1, 2, 3, 4, 5, 6, HEAD), held("n3", THIRD, 0, 1, HEAD)]
    assert (await coming).early and networked.connected == ([SECOND] if waits else [THIRD])


async def test_one_of_a_pipeline_that_gets_all_its_weights_first_needs_nobody(
    node: LiveNode, networked: FakeNetwork
) -> None:
    order = node.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND))
    coming = asyncio.create_task(node.instances.command(order))
    await happens(lambda: networked.asked, "its company being asked")
    node.handle(FIRST).remote.arrive()
    result = await coming
    assert result.ok and not result.early, "it has all its weights"


async def test_one_whose_engine_cannot_run_layers_apart_comes_whole(node: LiveNode, networked: FakeNetwork) -> None:
    node.pool.refuses_layers = "layers in other engines together with LoRA adapters"
    order = node.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND))
    result = await node.instances.command(order)
    assert result.ok and not result.early and result.whole_only == node.pool.refuses_layers
    assert [(x.came_whole, len(held_pieces(x))) for x in node.instances.all()] == [(True, HEAD + 1)]


async def test_an_engine_that_ends_while_it_waits_for_its_pipeline_fails(
    node: LiveNode, networked: FakeNetwork
) -> None:
    order = node.order(FIRST, LiveMode.PIPELINES, **ordered_with(SECOND))
    coming = asyncio.create_task(node.instances.command(order))
    await happens(lambda: networked.asked, "its company being asked")
    node.handle(FIRST).kill()
    result = await coming
    assert not result.ok and not list(node.instances.all())


async def test_what_other_machines_are_told_and_given(
    node: LiveNode, networked: FakeNetwork, given: list[tuple[str, str, bool]]
) -> None:
    node.instances.start()
    assert networked.offered is not None
    wanted = LayersWanted("m", "a/host:1")
    assert networked.offered.held(wanted) == []
    with pytest.raises(OrderRefused, match="no engine here runs layers of m"):
        await networked.offered.take(wanted, networked.theirs)
    first = await node.activate(FIRST, LiveMode.WHOLE)
    second = await node.activate(SECOND, LiveMode.PAIR)
    second.remote.arrive(2)
    told = {one.key: (one.pieces, one.led_pieces) for one in networked.offered.held(wanted)}
    assert told == {FIRST: (list(range(HEAD + 1)), HEAD - 3), SECOND: ([0, 1, 2, HEAD], 0)}
    for key, handle in ((FIRST, first), (SECOND, second)):
        mine = msgspec.structs.replace(wanted, key=key)
        assert await networked.offered.take(mine, networked.theirs) == DEVICE
        assert given.pop() == (f"layers-{handle.workers[0]}.sock", "a/host:1", False)
    with pytest.raises(OrderRefused, match="m#4"):
        await networked.offered.take(msgspec.structs.replace(wanted, key=FOURTH), networked.theirs)
