"""A node whose instances may serve before their weights are there, and other machines that it asks, on fake engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from prism.core.ids import DeviceId, Generation, ModelName, NodeId, node_of
from prism.core.instances import InstanceKey, whole_model
from prism.core.settings import LiveMode
from prism.engine.fake import FakeHandle, FakePool, FakeSpeed
from prism.node import live_pairs
from prism.node.instances import Instances
from prism.node.layers_network import HeldElsewhere, HeldPieces, Holders, LayersOffer, LayersWanted
from prism.node.measures import NodeMeasures
from prism.obs.metrics import Metrics
from prism.wire.commands import ActivateCommand, DeactivateCommand
from prism.wire.messages import CommandResult
from tests.integration.fake_system import SHAPE, model

from .conftest import DEVICE, Bench

MODEL = replace(model("m"), shape=replace(SHAPE, layers=6))
HEAD = MODEL.shape.layers + 1
FIRST, SECOND, THIRD, FOURTH = (InstanceKey(ModelName("m"), Generation(n)) for n in (1, 2, 3, 4))


class LiveNode:
    """One node and its instances."""

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


@asynccontextmanager
async def opened(bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LiveNode]:
    """Looks for peers and pipelines without a pause."""
    monkeypatch.setattr(live_pairs, "AGAIN_S", 0.0)
    monkeypatch.setattr(live_pairs, "PIPELINE_S", 0.01)
    made = LiveNode(bench, folder)
    try:
        yield made
    finally:
        made.instances.close()
        await made.pool.close()


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
