"""A machine that leaves, its takers and the controller: connections that break or stand still; nobody who decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from prism.core.events import OperatorLoad
from prism.core.ids import ModelName
from prism.engine.fake import FakePool
from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.node.agent import NodeAgent
from prism.node.leaving import LOOK_S
from prism.node.weights import NodeWeights
from prism.weights.store.weight_store import WeightStore
from prism.wire.secret import FleetSecret
from tests.kv.rows import ArrayRows
from tests.patience import PATIENCE_S, happens

from .fake_system import MIB, SPEED, System, fake_system, model, start_agent

SECRET = FleetSecret("the secret of these tests")
A, MARK = ModelName("a"), "fingerprint"
BOUND, TOKENS = 1 << 24, 320
FOR_EVER_S = 1e6
SOME_BYTES = 128 << 10
"""A part of the KV."""


@dataclass
class Link:
    """The way to ``address``, at one of its own, which brings SOME_BYTES and then nothing."""

    address: str
    breaks: bool
    """Connections end then, and no other one is made; else they stand still."""
    left: int = SOME_BYTES
    over: asyncio.Event = field(default_factory=asyncio.Event)
    carrying: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        yield "{}:{}".format(*server.sockets[0].getsockname()[:2])
        server.close()
        for task in self.carrying:
            task.cancel()
        await asyncio.gather(*self.carrying, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.over.is_set() and self.breaks:
            writer.close()
            return
        self.carrying.add(asyncio.create_task(self._carry(reader, writer)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.address.rpartition(":")
        from_there, to_there = await asyncio.open_connection(host, int(port))
        there = asyncio.create_task(self._bring(reader, to_there, counts=False))
        back = asyncio.create_task(self._bring(from_there, writer, counts=True))
        broken = asyncio.create_task(self.over.wait() if self.breaks else asyncio.Event().wait())
        try:
            await asyncio.wait([there, back, broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back, broken):
                task.cancel()
            await asyncio.gather(there, back, broken, return_exceptions=True)
            writer.close()
            to_there.close()

    async def _bring(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool) -> None:
        while data := await reader.read(1 << 16):
            self.left -= len(data) if counts else 0
            if self.left < 0:
                self.over.set()
                await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def fleet(folder: Path, *names: str) -> AsyncIterator[tuple[System, dict[str, NodeAgent]]]:
    """The machines named, which keep KV, and "local", which keeps none."""
    async with fake_system(folder, [model("a", 60 * MIB)], SECRET.mail_keys()) as system:
        agents = {name: join(system, folder, name) for name in names}
        nodes = system.controller.nodes
        await happens(lambda: len(nodes.all()) == 1 + len(names), "a fleet")
        yield system, agents


def join(system: System, folder: Path, name: str) -> NodeAgent:
    keys, pool = SECRET.mail_keys(), FakePool(SPEED, keys=SECRET.mail_keys())
    weights = NodeWeights(
        name,
        WeightStore(folder / name / "store"),
        bind="127.0.0.1:0",
        secret=SECRET.weights,
        models_dir=folder / name / "models",
        kv_pool=HostPool(folder / name / "kv", BOUND),
    )
    agent = start_agent(system.store, folder, pool, name, len(system.agents), name, keys, weights)
    system.pools.append(pool)
    system.agents.append(agent)
    system.tasks[name] = asyncio.create_task(agent.run())
    return agent


def pool_of(agent: NodeAgent) -> HostPool:
    assert agent.weights is not None and agent.weights._kv is not None
    return agent.weights._kv.pool


def keep_some(agent: NodeAgent) -> int:
    """As an engine there would; returns the bytes."""
    keeper = KvKeeper(pool_of(agent), f"{MARK} sglang/tp1/rank0/float32", 1.0)
    keeper.attach(ArrayRows((2048, 512), 600, seed=3))
    keeper.keep(np.arange(TOKENS), np.arange(TOKENS), "", 0, 60.0)
    held = pool_of(agent).held_bytes()[MARK]
    assert held > 2 * SOME_BYTES
    return held


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_taker_whose_connection_fails_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: bool
) -> None:
    """Or stands still. How long is a matter of time: it is said here to have been for long enough."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("prism.node.kv_handover.STALL_S", FOR_EVER_S)
    monkeypatch.setattr("prism.transfer.pull_lanes.GIVE_UP_S", 0.5)  # only the end of the test waits for it
    async with fleet(tmp_path, "b", "c", "d") as (_, agents):
        leaves, first, second = agents.values()
        assert leaves.weights is not None and first.weights is not None and leaves.weights.handover is not None
        handover, held = leaves.weights.handover, keep_some(leaves)
        link = Link(leaves.weights.server.address, breaks)
        async with link.opened() as address:
            bring = first.weights.bring_kv
            over_the_link = lambda model, mark, peers: bring(model, mark, dict.fromkeys(peers, address))  # noqa: E731
            monkeypatch.setattr(first.weights, "bring_kv", over_the_link)
            leaving = asyncio.create_task(leaves.leaving.run(FOR_EVER_S))
            async with asyncio.timeout(PATIENCE_S):
                await link.over.wait()
            await happens(lambda: MARK in handover._named_s, "a taker that is named")
            async with asyncio.timeout(PATIENCE_S):
                while not leaving.done():
                    if handover._takers.get(MARK) == "c":  # of which something may be heard after the link is over
                        handover._named_s[MARK] = handover._kv.taking._heard_s[MARK] = -2 * FOR_EVER_S
                    await asyncio.sleep(LOOK_S)
            assert leaves.report().kv_failed == {MARK: ["c"]}
            assert pool_of(second).held_bytes() == {MARK: held}
            assert f"d has {held} of {held} bytes" in caplog.text


async def test_without_a_controller_a_machine_with_a_model_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path) as (system, _):
        leaves = system.agents[0]
        await system.controller.admin._introduced(A)
        system.controller.feed(OperatorLoad(A, ("local/host:0",)))  # type: ignore[arg-type]
        await happens(lambda: system.controller.placement.route_of(A), "a route")
        system.tasks["controller"].cancel()
        await asyncio.gather(system.tasks["controller"], return_exceptions=True)
        leaving = asyncio.create_task(leaves.leaving.run(FOR_EVER_S))
        await asyncio.sleep(4 * LOOK_S)
        assert not leaving.done(), "its supervisor starts another one"
        monkeypatch.setattr("prism.node.leaving.ALONE_S", 0.5)
        async with asyncio.timeout(PATIENCE_S):
            await leaving
        assert leaves.leaving.done and leaves.instances.all()
        assert "there has been no controller" in caplog.text


async def test_without_a_controller_nobody_is_named_to_take_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(tmp_path, "b", "c") as (system, agents):
        keep_some(agents["b"])
        system.tasks["controller"].cancel()
        await asyncio.gather(system.tasks["controller"], return_exceptions=True)
        monkeypatch.setattr("prism.node.kv_handover.SILENT_S", 0.5)
        async with asyncio.timeout(PATIENCE_S):
            await agents["b"].leaving.run(FOR_EVER_S)
        assert "the controller named nobody to take it" in caplog.text
