"""Instances that serve before their weights are there: who of their machine runs their layers, on fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from prism.core.settings import LiveMode
from prism.engine.fake import FakeHandle
from prism.policy.live.routes import layer_order
from prism.remote.orders import RouteStop
from tests.patience import happens

from .conftest import DEVICE, Bench
from .live_node import FIRST, FOURTH, HEAD, SECOND, THIRD, LiveNode, opened


@pytest.fixture
async def node(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveNode]:
    async with opened(bench, tmp_path, monkeypatch) as made:
        yield made


def over(peer: FakeHandle) -> tuple[RouteStop, ...]:
    """The route of an engine whose layers but the first run at ``peer``."""
    return RouteStop("", 0, 2), RouteStop(str(peer.remote.served_at), 2, HEAD), RouteStop("", HEAD, HEAD + 1)


async def test_a_further_instance_serves_early_over_the_first_and_then_alone(node: LiveNode) -> None:
    first = await node.activate(FIRST, LiveMode.PAIR)
    assert not first.began_with, "there was nobody to run its layers"
    second = await node.activate(SECOND, LiveMode.PAIR)
    assert second.began_with == (0, 1, HEAD) and second.remote.grows
    assert second.remote.routes == [(over(first),)]
    report = next(r.remote for r in node.instances.reports() if r.key == SECOND)
    assert report is not None and (report.peers, report.held_layers, report.layers) == ([DEVICE], 1, HEAD - 1)
    assert node.registry.get_sample_value("prism_live_starts_total", {"model": "m", "device": DEVICE}) == 1
    second.remote.arrive()
    await happens(lambda: node.registry.get_sample_value("prism_live_seconds_count", {"model": "m"}), "it is alone")
    third = await node.activate(THIRD, LiveMode.PAIR)
    assert third.began_with == (0, 1, HEAD)
    assert third.remote.routes == [(over(first), over(second))], "the second is there for when the first is lost"


async def test_several_newcomers_are_dealt_to_those_that_have_everything(node: LiveNode) -> None:
    """Two at two: each has one for itself, and the other one as a fallback; they load from both ends."""
    old = [await node.activate(key, LiveMode.WHOLE) for key in (FIRST, SECOND)]
    new = await asyncio.gather(*(node.activate(key, LiveMode.PAIR) for key in (THIRD, FOURTH)))
    routes = [handle.remote.routes[0] for handle in new]
    assert set(routes) == {(over(old[0]), over(old[1])), (over(old[1]), over(old[0]))}
    assert sorted(tuple(handle.remote.order) for handle in new) == sorted(layer_order(6, turn, 2) for turn in (0, 1))


async def test_newcomers_whose_peer_is_gone_run_what_they_have_for_each_other(node: LiveNode) -> None:
    await node.activate(FIRST, LiveMode.WHOLE)
    up, down = [await node.activate(key, LiveMode.PAIR) for key in (SECOND, THIRD)]
    assert (up.remote.order, down.remote.order) == (layer_order(6, 0, 2), layer_order(6, 1, 2))
    middle = HEAD // 2
    up.remote.arrive(*range(2, middle + 1))
    down.remote.arrive(*range(middle + 1, HEAD))
    assert (await node.deactivate(FIRST)).ok
    for handle in (up, down):
        handle.remote.lose_peers()
    await happens(lambda: len(up.remote.routes) == len(down.remote.routes) == 2, "other routes")
    rest = RouteStop(str(down.remote.served_at), middle + 1, HEAD)
    assert up.remote.routes[1] == ((RouteStop("", 0, middle + 1), rest, RouteStop("", HEAD, HEAD + 1)),)
    rest = RouteStop(str(up.remote.served_at), 2, middle + 1)
    assert down.remote.routes[1] == ((RouteStop("", 0, 2), rest, RouteStop("", middle + 1, HEAD + 1)),)


async def test_off_is_off(node: LiveNode) -> None:
    await node.activate(FIRST, LiveMode.WHOLE)
    assert not (await node.activate(SECOND, LiveMode.WHOLE)).began_with
    assert node.handle(FIRST).remote.served_at is None


async def test_one_that_cannot_run_layers_for_others_is_no_peer(node: LiveNode) -> None:
    first = await node.activate(FIRST, LiveMode.PAIR)
    first.remote.refuses = "no such socket"
    result = await node.instances.command(node.order(SECOND, LiveMode.PAIR))
    assert (result.early, result.whole_only) == (False, "") and not node.handle(SECOND).began_with
    first.remote.refuses = ""
    assert (await node.activate(THIRD, LiveMode.PAIR)).began_with, "another time it may"


async def test_an_engine_whose_peer_is_gone_gets_another_one(node: LiveNode) -> None:
    first, second = [await node.activate(key, LiveMode.WHOLE) for key in (FIRST, SECOND)]
    third = await node.activate(THIRD, LiveMode.PAIR)
    assert third.remote.routes == [(over(first), over(second))]
    assert (await node.deactivate(FIRST)).ok
    third.remote.lose_peers()
    await happens(lambda: len(third.remote.routes) == 2, "another route")
    assert third.remote.routes[1] == (over(second),) and third.remote.grows


async def test_an_engine_that_has_everything_is_not_made_to_begin_again(node: LiveNode) -> None:
    """Its peer is gone, and it has not gone on alone yet: a route would cost its requests what they have."""
    await node.activate(FIRST, LiveMode.WHOLE)
    leader = await node.activate(SECOND, LiveMode.PAIR)
    assert leader.remote.state is not None
    all_here = list(range(HEAD + 1))
    leader.remote.state = msgspec.structs.replace(leader.remote.state, pieces=all_here, alone=False, peers=[])
    await asyncio.sleep(0.3)
    assert len(leader.remote.routes) == 1


async def test_one_that_loads_itself_runs_no_layers_for_others(node: LiveNode) -> None:
    first = await node.activate(FIRST, LiveMode.PAIR)
    second = await node.activate(SECOND, LiveMode.PAIR)
    first.kill()
    await happens(lambda: FIRST not in [x.key for x in node.instances.all()], "the first is gone")
    assert second.began_with and not (await node.activate(THIRD, LiveMode.PAIR)).began_with
