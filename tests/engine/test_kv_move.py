"""KV that outlives its engine, leaves it under pressure and comes back: every answer as if nothing had happened."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from prism.core.specs import Scheduling
from prism.engine.handle import EngineHandle
from prism.kv.exchange import fetch_kv
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import drop_host_pool, host_pool_directory
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from tests.engine.families import FAMILIES, make_model
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.kv.nodes import KvNode
from tests.kv.stored import forget, named, spoil, stored
from tests.patience import PATIENCE_S, happens

pytestmark = pytest.mark.engine
NAME, NEW = "demo-llama", 20
BOUND = 64 << 20


@pytest.fixture
async def kept(rig: Rig) -> AsyncIterator[HostPool]:
    """The rig's engines keep KV in a pool of its own."""
    accounts = rig.folder / "accounts"
    write_kv_settings(accounts, KvSettings(host_bytes=BOUND))
    yield HostPool(host_pool_directory(accounts), BOUND)
    drop_host_pool(accounts)


def cached(rig: Rig, rid: str) -> int:
    return max(item.cached_tokens for item in rig.items[rid])


async def turn(rig: Rig, handle: EngineHandle, asked: Sequence[int]) -> tuple[list[int], int]:
    """The answer, which is the reference's, and how many tokens of the prompt were not computed for it."""
    rid = rig.submit(handle, tokenized("", asked, NEW))
    answer = await rig.answer(rid)
    assert answer == rig.reference(NAME, asked, NEW)
    return answer, cached(rig, rid)


def by_way_of_another_machine(kept: HostPool, folder: Path) -> None:
    """All pieces go to another machine's pool over the transport, and from there come back."""
    (fingerprint,) = {kept.note(named(piece)[0]).weights.split(" ")[0] for piece in stored(kept)}
    here, there = (KvNode(name, pool) for name, pool in (("here", kept), ("there", HostPool(folder / "there", BOUND))))
    try:
        before = kept.use()
        assert fetch_kv(there.offers, there.server, here.holder, fingerprint, 1e12, BOUND) == before.file_bytes
        for space in kept.spaces(fingerprint):
            for piece in kept.pieces(space):
                forget(kept, piece)
        assert kept.use().pieces == kept.use().booked_bytes == 0
        fetch_kv(here.offers, here.server, there.holder, fingerprint, 1e12, BOUND)
        assert kept.use() == before
    finally:
        here.server.close()
        there.server.close()


async def test_a_conversation_goes_on_from_its_cache_wherever_its_model_comes_back(
    rig: Rig, kept: HostPool, tmp_path: Path
) -> None:
    said = [*prompt(1, 300)]
    other = [*said[:150], *prompt(2, 90)]
    async with rig.engine(NAME) as handle:
        answer, hits = await turn(rig, handle, said)
        assert hits == 0
        await turn(rig, handle, other)
        running = rig.submit(handle, tokenized("", prompt(7, 200), 400))
        await rig.wait_tokens(running, 30)
    pieces = kept.use().pieces
    assert pieces > 0 and rig.free_bytes(0) == DEVICE_BYTES
    following = [*said, *answer, *prompt(3, 10)]
    for device in (0, 1):
        if device == 1:
            by_way_of_another_machine(kept, tmp_path)
        async with rig.engine(NAME, device) as handle:
            _, hits = await turn(rig, handle, following)
            assert hits >= 300 + NEW - 1, "the prompt and all of the answer but its last token, which was not read"
            _, hits = await turn(rig, handle, [*other, 5, 6])
            assert hits >= 192, "whole pieces of what the two have in common"
            resumed = rig.tokens[running]
            rid = rig.submit(handle, tokenized("", prompt(7, 200), len(resumed) + 5), resumed=resumed)
            assert (await rig.answer(rid)) == rig.reference(NAME, prompt(7, 200), len(resumed) + 5)
            assert cached(rig, rid) >= 200 + 29, "a request that was running when its model left"
    for piece in stored(kept):
        spoil(kept, piece)
    async with rig.engine(NAME) as handle:
        _, hits = await turn(rig, handle, following)
        assert hits == 0, "corrupt pieces are computed again"
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert kept.use().booked_bytes == kept.use().file_bytes


async def test_prefixes_that_are_evicted_come_back(rig: Rig, kept: HostPool) -> None:
    """A limit of two pages leaves room for about one conversation; they take turns."""
    conversations = [[*prompt(10 + i, 280)] for i in range(4)]
    async with rig.engine(NAME) as handle:
        handle.set_kv_limit(2 * rig.pool.memory[rig.devices[0]].page_bytes)
        for said in conversations:
            await turn(rig, handle, said)
        found = [(await turn(rig, handle, [*said, 7]))[1] for said in conversations]
        assert min(found) >= 256, "whole pieces of what is asked again"
        await until_counted(handle)
    assert rig.free_bytes(0) == DEVICE_BYTES


async def test_requests_without_memory_are_paged_out_and_in(rig: Rig, kept: HostPool, wide_model: Path) -> None:
    prompts = [prompt(20 + i, 80) for i in range(6)]
    page_bytes = rig.pool.memory[rig.devices[0]].page_bytes
    handle = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]])
    try:
        rids = [rig.submit(handle, tokenized("", p, 60)) for p in prompts]
        await rig.wait_tokens(rids[-1], 25)
        handle.set_kv_limit(12 * page_bytes)
        await asyncio.gather(*(rig.answer(rid) for rid in rids))
        assert [rig.tokens[rid] for rid in rids] == [reference(wide_model, p, 60) for p in prompts]
        await happens(
            lambda: (load := handle.load) and load.retractions and load.kv_brought_tokens > 25, "both are told"
        )
    finally:
        await handle.deactivate()
    assert rig.free_bytes(0) == DEVICE_BYTES


async def until_counted(handle: EngineHandle) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while handle.load is None or handle.load.running or not handle.load.kv_brought_tokens:
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_others_go_on_while_kv_comes_over_a_link_and_a_kill_while_it_leaves_harms_nobody(
    rig: Rig, kept: HostPool
) -> None:
    said = [*prompt(1, 600)]
    async with rig.engine(NAME) as handle:
        await turn(rig, handle, said)
    # Computing is taken to last half a second before it was timed, and what is shorter is not timed.
    slow = DeclaredLinks(host=kept.use().file_bytes / 0.3)
    write_kv_settings(rig.folder / "accounts", KvSettings(host_bytes=BOUND, links={"host:1": slow}))
    handle = await rig.activate(rig.spec(NAME), [rig.devices[1]])
    beside = rig.submit(handle, tokenized("", prompt(2), 1000))
    before = len(await rig.wait_tokens(beside, 5))
    late = rig.submit(handle, tokenized("", [*said, 5], NEW))
    await rig.wait_tokens(late, 1)
    meanwhile = len(rig.tokens[beside]) - before
    assert cached(rig, late) >= 576, "nine whole pieces"
    assert meanwhile >= 2, "the running request went on while the other's KV came"
    assert await rig.answer(late) == rig.reference(NAME, [*said, 5], NEW)
    leaving = asyncio.create_task(handle.deactivate())
    await asyncio.sleep(0.02)
    os.kill(handle.pids[0], signal.SIGKILL)
    await leaving
    use = kept.use()
    assert use.booked_bytes == use.file_bytes
    async with rig.engine(NAME) as again:
        resumed = rig.tokens[beside][:]
        rid = rig.submit(again, tokenized("", prompt(2), len(resumed) + 3), resumed=resumed)
        assert await rig.answer(rid) == rig.reference(NAME, prompt(2), len(resumed) + 3)
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("config", ["Glm4MoeLite", "Mellum", "GptOss", "MiMo-V2"])
async def test_latent_rows_and_windows_move_like_any_others(
    rig: Rig, kept: HostPool, tmp_path: Path, config: str
) -> None:
    """MLA: a token is one row per layer. Windows: of a token that has left them only one kind of row is there."""
    family = next(family for family in FAMILIES if config in (family.config, family.serves))
    path = make_model(family, tmp_path / "latent", rig.models / NAME)
    said, tokens = [*prompt(5, 70)], []
    for number in range(2):
        handle = await rig.activate(rig.spec_at(path, **family.engine), [rig.devices[number]])
        rid = rig.submit(handle, tokenized("", [*said, *tokens], 4))
        tokens += await rig.answer(rid)
        assert cached(rig, rid) >= 70 if number else cached(rig, rid) == 0
        await handle.deactivate()
    assert tokens == reference(path, tuple(said), 8)
    assert kept.use().pieces > 0 and rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", Scheduling)
async def test_requests_with_windows_are_paged_out_and_in(
    rig: Rig, kept: HostPool, tmp_path: Path, scheduling: Scheduling
) -> None:
    """For want of memory, and by turns. What they decoded has left the windows by then."""
    family = next(family for family in FAMILIES if family.config == "Mellum")
    path = make_model(family, tmp_path / "wide", rig.models / NAME, wide=True)
    asked, page_bytes = [prompt(20 + i, 80) for i in range(3)], rig.pool.memory[rig.devices[0]].page_bytes
    spec = dataclasses.replace(rig.spec_at(path, **family.engine), scheduling=scheduling)
    handle = await rig.activate(spec, [rig.devices[0]])
    rids = [rig.submit(handle, tokenized("", each, 12)) for each in asked]
    await rig.wait_tokens(rids[-1], 2)
    handle.set_kv_limit(2 * page_bytes)
    for rid, each in zip(rids, asked, strict=True):
        assert await rig.answer(rid) == reference(path, each, 12)
    await until_counted(handle)
    await handle.deactivate()
    assert rig.free_bytes(0) == DEVICE_BYTES
    assert kept.use().booked_bytes == kept.use().file_bytes


@pytest.mark.slow
async def test_ranks_bring_back_what_all_of_them_have(rig: Rig, kept: HostPool) -> None:
    said = [*prompt(1, 300)]
    async with rig.engine(NAME, 0, 1) as handle:
        answer, _ = await turn(rig, handle, said)
    following = [*said, *answer, 9]
    second = stored(kept, 2)
    assert len(second) == 2, "one of each rank"
    forget(kept, second[0])
    async with rig.engine(NAME, 0, 1) as handle:
        _, hits = await turn(rig, handle, following)
        assert hits == 128
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
async def test_kv_in_eight_bits_moves_and_is_no_other_format_s(rig: Rig, kept: HostPool, tp: int) -> None:
    """What an engine answers from its cache another one of the same format answers from what that left, and none of
    another format finds it."""
    asked = prompt(1, 300)
    for kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2"):
        spec, said, answers = rig.spec_at(rig.models / NAME, tp=tp, kv_cache_dtype=kv_cache_dtype), [*asked], []
        for engine in range(2):
            handle = await rig.activate(spec, rig.devices[:tp] if tp > 1 else [rig.devices[engine]])
            for number in range(2):
                rid = rig.submit(handle, tokenized("", said, NEW))
                answers.append(await rig.answer(rid))
                assert cached(rig, rid) >= 300 if engine or number else cached(rig, rid) == 0
                said = [*said, *answers[-1], 9] if not engine and not number else said
            await handle.deactivate()
        first, *following = answers
        assert first and following == [following[0]] * 3
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert kept.use().booked_bytes == kept.use().file_bytes
