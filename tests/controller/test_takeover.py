"""A new controller hears the fleet first."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prism.controller import takeover
from prism.controller.admin import Admin, CommandRefused
from prism.controller.nodes import FleetNodes
from prism.controller.rescue import SILENT_S, Rescue
from prism.controller.takeover import fleet_heard
from prism.controller.versions import Versions
from prism.core.ids import DeviceId, NodeId
from prism.store.connect import open_store
from prism.store.interface import Store
from prism.store.values import AgentRecord
from tests.controller.test_fleet import report
from tests.patience import PATIENCE_S


async def announce(store: Store, *names: str, seen_s: float = 1) -> None:
    for name in names:
        mailbox, devices = f"tcp://{name}:1", [DeviceId(f"{name}/host:0")]
        await store.announce_agent(AgentRecord(node=NodeId(name), mailbox=mailbox, devices=devices, seen_s=seen_s))


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


async def test_who_is_known_to_be_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "HEARD_WITHIN_S", 10 * PATIENCE_S)
    store, nodes = open_store("memory://"), FleetNodes()
    await announce(store, "a", "dead")
    nodes.report(report("a"), 0.0)
    async with asyncio.timeout(PATIENCE_S):
        await fleet_heard(store, nodes, lambda record: record.node == "dead")


async def test_who_does_not_report_is_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(takeover, "HEARD_WITHIN_S", 0.2)
    store, nodes = open_store("memory://"), FleetNodes()
    await announce(store, "a", "dead")
    nodes.report(report("a"), 0.0)
    async with asyncio.timeout(PATIENCE_S):
        await fleet_heard(store, nodes)
    assert "count as gone until they do: dead" in caplog.text


def admin_of(store: Store, nodes: FleetNodes) -> Any:
    """What answers operators, of a controller that has these."""
    return Admin(cast(Any, SimpleNamespace(store=store, nodes=nodes, rescue=Rescue(store, "controller"))))


async def test_a_device_is_known_to_operators_when_its_machine_is_to_the_store() -> None:
    store, nodes = open_store("memory://"), FleetNodes()
    await announce(store, "a", "b")
    nodes.report(report("a"), 0.0)
    admin = admin_of(store, nodes)
    assert await admin._named(["a/host:0"]) == ("a/host:0",), "who is known is not waited for"
    asked = asyncio.create_task(admin._named(["b/host:0"]))
    await asyncio.sleep(3 * takeover.LOOK_S)
    assert not asked.done()
    nodes.report(report("b"), 0.0)
    async with asyncio.timeout(PATIENCE_S):
        assert await asked == ("b/host:0",)


async def test_a_device_of_a_machine_that_died_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "HEARD_WITHIN_S", 10 * PATIENCE_S)
    store, nodes = open_store("memory://"), FleetNodes()
    await announce(store, "a", "dead")
    nodes.report(report("a"), 0.0)
    admin = admin_of(store, nodes)
    await admin._c.rescue.look(nodes, Versions(), time.monotonic() - SILENT_S - 1)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(CommandRefused, match=r"'dead/host:0' names no device that is up"):
            await admin._named(["dead/host:0"])
    await announce(store, "dead", seen_s=2)  # it comes back, and nobody has looked since
    asked = asyncio.create_task(admin._named(["dead/host:0"]))
    await asyncio.sleep(3 * takeover.LOOK_S)
    assert not asked.done()
    nodes.report(report("dead"), 0.0)
    async with asyncio.timeout(PATIENCE_S):
        assert await asked == ("dead/host:0",)


async def test_a_device_that_nobody_has_is_refused() -> None:
    store, nodes = open_store("memory://"), FleetNodes()
    await announce(store, "a")
    nodes.report(report("a"), 0.0)
    with pytest.raises(CommandRefused, match=r"'c/host:0' names no device that is up; choices: a/host:0"):
        await admin_of(store, nodes)._named(["c/host:0"])
