"""Cluster state: placement, lease, limits, logs."""

from __future__ import annotations

import asyncio

import pytest

from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import whole_model
from prism.core.views import InstanceState
from prism.store.interface import Store
from prism.store.values import FRONT_DEAD, AgentRecord, LeaseLost, PlacementChange, Replica
from tests.patience import PATIENCE_S

M = ModelName("m")
LONG_S = 2 * PATIENCE_S
READY = Replica(
    parts=whole_model([DeviceId("local/host:0")]),
    state=InstanceState.READY,
    generation=Generation(3),
    reason="kvpr",
    since_s=1.5,
)


async def test_placement_round_trip_and_watch(store: Store) -> None:
    holder = await store.acquire_lease("c1", "ipc:///c1", LONG_S)
    assert holder is not None
    changes = store.watch_placement()
    assert await anext(changes) == PlacementChange(None)
    await store.set_placement(M, [READY], holder)
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(changes) == PlacementChange(M)
    assert await store.placement() == {M: [READY]}
    await store.set_placement(M, [], holder)
    assert await store.placement() == {}
    await changes.aclose()  # type: ignore[attr-defined]


async def test_only_the_lease_holder_places(store: Store) -> None:
    old = await store.acquire_lease("c1", "ipc:///c1", LONG_S)
    assert old is not None
    assert await store.acquire_lease("c2", "ipc:///c2", LONG_S) is None
    assert await store.renew_lease(old, 0.05)
    async with asyncio.timeout(PATIENCE_S):
        while (new := await store.acquire_lease("c2", "ipc:///c2", LONG_S)) is None:
            await asyncio.sleep(0.01)
    assert new.fence > old.fence
    with pytest.raises(LeaseLost):
        await store.set_placement(M, [READY], old)
    assert not await store.renew_lease(old, LONG_S)
    assert await store.controller() == new
    assert await store.renew_lease(new, LONG_S)
    await store.release_lease(old)
    assert await store.controller() == new
    await store.release_lease(new)
    assert await store.controller() is None


async def test_agents(store: Store) -> None:
    agent = AgentRecord(
        node=NodeId("n"), mailbox="ipc:///n", devices=[DeviceId("n/host:0")], seen_s=12.0, detail={"a": 1}
    )
    await store.announce_agent(agent)
    assert await store.agents() == [agent]
    await store.remove_agent(NodeId("n"))
    assert await store.agents() == []


async def test_fronts(store: Store) -> None:
    await store.announce_front("ipc:///f1", 10.0)
    await store.announce_front("ipc:///f1", 11.5)
    await store.announce_front("ipc:///f2", 12.0)
    await store.remove_front("ipc:///f2")
    await store.announce_front("ipc:///f3", 12.0)
    await store.bury_front("ipc:///f3")
    assert await store.fronts() == {"ipc:///f1": 11.5, "ipc:///f3": FRONT_DEAD}


async def test_a_bucket_refuses_what_it_does_not_hold_and_says_when(store: Store) -> None:
    first = await store.rate_take("k", 50, 60, 1000.0)
    assert (first.allowed, first.remaining, first.limit) == (True, 10, 60)
    assert first.reset_s == pytest.approx(50.0)
    refused = await store.rate_take("k", 20, 60, 1000.0)
    assert not refused.allowed and refused.retry_after_s == pytest.approx(10.0)
    assert (await store.rate_take("k", 20, 60, 1010.0)).allowed
    assert (await store.rate_take("k", -20, 60, 1010.0)).remaining == 20
    assert (await store.rate_take("k", 0, 60, 2000.0)).remaining == 60


async def test_counters_decisions_docs_and_catalog_generation(store: Store) -> None:
    await store.count({"m:arrivals": 1, "m:tokens": 12.5})
    await store.count({"m:arrivals": 2})
    assert await store.counters("m:") == {"m:arrivals": 3.0, "m:tokens": 12.5}
    for i in range(5):
        await store.append_decision(f'{{"i":{i}}}', keep=3)
    assert await store.decisions() == ['{"i":4}', '{"i":3}', '{"i":2}']
    await store.put_doc("plan", "{}")
    assert await store.doc("plan") == "{}" and await store.doc("none") is None
    before = await store.catalog_generation()
    assert await store.bump_catalog_generation() == before + 1
    await store.ping()
