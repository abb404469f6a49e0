"""A new controller hears the fleet first."""

from __future__ import annotations

import asyncio

import pytest

from prism.controller import takeover
from prism.controller.nodes import FleetNodes
from prism.controller.takeover import fleet_heard
from prism.core.ids import DeviceId, NodeId
from prism.store.connect import open_store
from prism.store.interface import Store
from prism.store.values import AgentRecord
from tests.controller.test_fleet import report
from tests.patience import PATIENCE_S


async def announce(store: Store, *names: str) -> None:
    for name in names:
        devices = [DeviceId(f"{name}/host:0")]
        await store.announce_agent(AgentRecord(node=NodeId(name), mailbox=f"tcp://{name}:1", devices=devices, seen_s=1))


async def test_where_nobody_is_announced_nobody_is_waited_for() -> None:
    async with asyncio.timeout(PATIENCE_S):
        await fleet_heard(open_store("memory://"), FleetNodes())


async def test_all_that_are_announced_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "HEARD_WITHIN_S", 10 * PATIENCE_S)
    store, nodes = open_store("memory://"), FleetNodes()
    await announce(store, "a", "b")
    waits = asyncio.create_task(fleet_heard(store, nodes))
    nodes.report(report("a"), 0.0)
    await asyncio.sleep(3 * takeover.LOOK_S)
    assert not waits.done()
    nodes.report(report("b"), 0.0)
    async with asyncio.timeout(PATIENCE_S):
        await waits


async def test_who_does_not_report_is_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(takeover, "HEARD_WITHIN_S", 0.2)
    store, nodes = open_store("memory://"), FleetNodes()
    await announce(store, "a", "dead")
    nodes.report(report("a"), 0.0)
    async with asyncio.timeout(PATIENCE_S):
        await fleet_heard(store, nodes)
    assert "taken for gone: dead" in caplog.text
