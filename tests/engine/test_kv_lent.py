"""KV that engines keep in memory lent by another device: lenders that die or want it back, borrowers that die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from prism.engine.handle import EngineHandle
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import drop_host_pool, host_pool_directory
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized, until_died
from tests.patience import happens

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NAME, OTHER, NEW = "demo-llama", "demo-qwen3", 20
BOUND = 64 << 20
HOST_BYTES_S, PEER_BYTES_S = 4e6, 1e9
"""Host memory so slow that a kill meets copies, the lender so fast that bringing is shorter than computing anywhere."""
CONVERSATIONS = [[*prompt(10 + i, 280)] for i in range(4)]


@pytest.fixture
async def lending(rig: Rig) -> AsyncIterator[HostPool]:
    """The second device lends to the first; the pool in host memory that is behind both."""
    accounts = rig.folder / "accounts"
    links = {"host:0": DeclaredLinks(host=HOST_BYTES_S, peer=PEER_BYTES_S)}
    write_kv_settings(accounts, KvSettings(host_bytes=BOUND, lend_keep_fraction=0.1, links=links))
    rig.pool.memory[rig.devices[1]].offer(DEVICE_BYTES // 10)
    yield HostPool(host_pool_directory(accounts), BOUND)
    drop_host_pool(accounts)


def lent_bytes(rig: Rig) -> int:
    return sum(owner.lent_bytes for owner in rig.pool.memory[rig.devices[1]].stats().owners)


async def take_turns(rig: Rig, handle: EngineHandle) -> list[int]:
    """Every conversation once; how many tokens of each were not computed."""
    hits = []
    for said in CONVERSATIONS:
        rid = rig.submit(handle, tokenized("", said, NEW))
        assert await rig.answer(rid) == rig.reference(NAME, said, NEW)
        hits.append(max(item.cached_tokens for item in rig.items[rid]))
    return hits


async def borrow(rig: Rig) -> EngineHandle:
    """An engine on the first device with too little memory for all conversations, after a turn of each: what it cannot
    hold lies with the second."""
    handle = await rig.activate(rig.spec(NAME), [rig.devices[0]])
    handle.set_kv_limit(2 * rig.pool.memory[rig.devices[0]].page_bytes)
    await take_turns(rig, handle)
    await happens(lambda: lent_bytes(rig) > 0, "lent memory in use")
    return handle


async def test_lent_kv_outlives_the_lenders_engine_and_goes_where_there_is_room_when_it_is_wanted_back(
    rig: Rig, lending: HostPool
) -> None:
    lender = await rig.activate(rig.spec(OTHER), [rig.devices[1]])
    handle = await borrow(rig)
    assert min(await take_turns(rig, handle)) >= 256, "whole pieces of what is asked again"
    os.kill(lender.pids[0], signal.SIGKILL)
    await until_died(lender)
    assert min(await take_turns(rig, handle)) >= 256, "the lender's engine died, not what it lent"
    before = lending.use().pieces
    rig.pool.memory[rig.devices[1]].offer(None)
    busy = rig.submit(handle, tokenized("", prompt(1), 400))
    await happens(lambda: lent_bytes(rig) == 0, "everything lent to be given back")
    assert lending.use().pieces > before, "it went to host memory"
    assert await rig.answer(busy) == rig.reference(NAME, prompt(1), 400)
    assert min(await take_turns(rig, handle)) >= 256
    await handle.deactivate()
    rig.pool.memory[rig.devices[1]].reap()
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert lending.use().booked_bytes == lending.use().file_bytes


async def test_a_borrower_killed_while_it_copies_leaves_nothing_with_its_lender(rig: Rig, lending: HostPool) -> None:
    handle = await borrow(rig)
    said = CONVERSATIONS[0]
    rid = rig.submit(handle, tokenized("", said, 300))
    await rig.wait_tokens(rid, 5)
    leaving = asyncio.create_task(handle.deactivate())  # what is lent goes to host memory over the slow link
    before = lending.use().file_bytes
    await happens(lambda: lending.use().file_bytes > before, "a copy under way")
    os.kill(handle.pids[0], signal.SIGKILL)
    await leaving
    for device in rig.devices:
        rig.pool.memory[device].reap()
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert lending.use().booked_bytes == lending.use().file_bytes
    assert not list(lending.directory.glob("*/.part-*"))
    async with rig.engine(NAME) as again:
        resumed = rig.tokens[rid][:]
        rid = rig.submit(again, tokenized("", said, len(resumed) + 5), resumed=resumed)
        assert await rig.answer(rid) == rig.reference(NAME, said, len(resumed) + 5)
        await take_turns(rig, again)
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
