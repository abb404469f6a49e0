"""Instances that serve before their weights are there: who runs their layers, on fake engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.settings import LiveMode
from prism.engine.fake import FakeHandle, FakePool, FakeSpeed
from prism.node import live_pairs
from prism.node.instances import Instances
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics
from prism.remote.orders import RouteStop
from prism.wire.messages import ActivateCommand, CommandResult, DeactivateCommand
from tests.integration.fake_system import model
from tests.patience import happens

from .conftest import DEVICE, Bench

MODEL = model("m")
HEAD = MODEL.shape.layers + 1
FIRST, SECOND, THIRD = (InstanceKey(ModelName("m"), Generation(n)) for n in (1, 2, 3))


class Pairs:
    """A node whose instances may serve early."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.pool = FakePool(FakeSpeed())
        measures = NodeMeasures(Metrics(self.registry), [])
        shells = {DEVICE: bench.shell}
        self.instances = Instances(NodeId("local"), self.pool, shells, lambda: None, measures, layers_dir=folder)
        bench.on_emptied = self.instances.note_emptied

    async def activate(self, key: InstanceKey, live: LiveMode, devices: Sequence[DeviceId] = (DEVICE,)) -> FakeHandle:
        command = ActivateCommand(
            command=f"up {key}",
            reply_to="",
            key=key,
            parts=whole_model(devices),
            spec=MODEL,
            reason="test",
            live=live,
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
    assert third.remote.routes == [(over(first),)]
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
