"""Greedy float32 answers equal Hugging Face's token for token, whatever happened to the engine before or meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.engine.rig import DEVICE_BYTES, MODELS, Rig, prompt, tokenized, until_died
from tests.patience import PATIENCE_S, happens

pytestmark = pytest.mark.engine
NEW = 40
FIRST_AND_OTHERS = [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])]
"""Every model answers cold, warm and again in the default target; what is done to an engine, of one."""


async def check(rig: Rig, handle: object, name: str, seeds: tuple[int, ...]) -> None:
    prompts = [prompt(seed) for seed in seeds]
    rids = [rig.submit(handle, tokenized("", p, NEW)) for p in prompts]  # type: ignore[arg-type]
    for rid, p in zip(rids, prompts, strict=True):
        assert await rig.answer(rid) == rig.reference(name, p, NEW)
        assert rig.finish[rid] == {"type": "length", "length": NEW}


@pytest.mark.parametrize("name", MODELS)
async def test_cold_warm_other_model_again_and_elsewhere(rig: Rig, name: str) -> None:
    other = MODELS[(MODELS.index(name) + 1) % len(MODELS)]
    async with rig.engine(name) as cold:
        assert not cold.info.from_image
        await check(rig, cold, name, (1, 2))
        await check(rig, cold, name, (1, 3))  # the first prompt is in the prefix cache now
    async with rig.engine(other) as between:
        assert between.pids == cold.pids, "the worker takes one model after the other"
        await check(rig, between, other, (1,))
    async with rig.engine(name) as again:
        assert again.info.from_image
        assert again.source == "host"
        await check(rig, again, name, (1, 4))
        async with rig.engine(name, 1) as elsewhere:
            assert elsewhere.info.from_image
            await check(rig, elsewhere, name, (1, 2))
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.parametrize("name", FIRST_AND_OTHERS)
async def test_shared_prefixes(rig: Rig, name: str) -> None:
    base = prompt(5, 60)
    family = [base, base[:40], (*base, 11, 12, 13), (*base[:50], 99, 98), (*base, 11, 12, 14)]
    async with rig.engine(name) as handle:
        assert await rig.ask(handle, tokenized("", base, NEW)) == rig.reference(name, base, NEW)
        rids = [rig.submit(handle, tokenized("", p, NEW)) for p in family]
        for rid, p in zip(rids, family, strict=True):
            assert await rig.answer(rid) == rig.reference(name, p, NEW)
        assert any(item.cached_tokens >= 40 for rid in rids for item in rig.items[rid])


@pytest.mark.parametrize("name", FIRST_AND_OTHERS)
async def test_resumed_in_mid_answer_after_the_engine_was_killed(rig: Rig, name: str) -> None:
    p = prompt(6)
    expected = rig.reference(name, p, NEW)
    first = await rig.activate(rig.spec(name), [rig.devices[0]])
    rids = [rig.submit(first, tokenized(f"resume-{name}-{i}", prompt(6 + i), NEW)) for i in range(4)]
    await rig.wait_tokens(rids[0], 5)
    watching = asyncio.create_task(until_died(first))
    os.kill(first.pids[0], signal.SIGKILL)
    events = await watching
    assert type(events[-1]).__name__ == "Died"
    assert "SIGKILL" in events[-1].reason  # type: ignore[union-attr]
    assert not first.alive
    async with rig.engine(name, 1) as second:
        for i, rid in enumerate(rids):
            if rid not in rig.finish:
                rig.submit(second, tokenized(rid, prompt(6 + i), NEW), attempt=1, resumed=rig.tokens.get(rid, []))
        assert await rig.answer(rids[0]) == expected
        for i, rid in enumerate(rids[1:], 1):
            assert await rig.answer(rid) == rig.reference(name, prompt(6 + i), NEW)
    assert rig.free_bytes(0) == DEVICE_BYTES


@pytest.mark.parametrize("name", FIRST_AND_OTHERS)
async def test_tensor_parallel_of_two(rig: Rig, name: str) -> None:
    async with rig.engine(name, 0, 1) as handle:
        assert len(handle.pids) == 2
        await check(rig, handle, name, (1, 2, 3))
        p = prompt(1)
        whole = rig.reference(name, p, NEW)
        resumed = rig.submit(handle, tokenized("tp-resume", p, NEW), attempt=1, resumed=whole[:17])
        assert await rig.answer(resumed) == whole
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.parametrize("devices", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)], ids=["one", "two-ranks"])
async def test_memory_pressure_with_retraction(rig: Rig, devices: tuple[int, ...]) -> None:
    """The limit falls to one page while many requests run: all are answered exactly, after waiting if need be."""
    name, count, tokens = "demo-llama", 12, 5 * NEW  # so many that they still run when the limit falls
    prompts = [prompt(20 + i, 80) for i in range(count)]
    async with rig.engine(name, *devices) as handle:
        rids = [rig.submit(handle, tokenized("", p, tokens)) for p in prompts]
        await rig.wait_tokens(rids[-1], 3)
        handle.set_kv_limit(2 << 20)
        await asyncio.gather(*(rig.answer(rid) for rid in rids))
        await rig.ask(handle, tokenized("", prompt(1), 1))
        assert [rig.tokens[rid] for rid in rids[:4]] == [rig.reference(name, p, tokens) for p in prompts[:4]]
        await happens(lambda: handle.load and handle.load.retractions > 0, "a retraction that is told")
        held = rig.pool.memory[rig.devices[0]].stats()
        assert sum(owner.kv_bytes for owner in held.owners) <= 2 << 20
    assert rig.free_bytes(0) == DEVICE_BYTES


async def test_memory_wanted_by_others_comes_back(rig: Rig) -> None:
    """A waiting reservation of another process gets what cached prefixes hold."""
    account = rig.pool.memory[rig.devices[0]]
    async with rig.engine("demo-llama") as handle:
        for i in range(6):
            await rig.ask(handle, tokenized("", prompt(40 + i, 300), 4))
        before = rig.free_bytes()
        with account.register("newcomer") as newcomer:
            await asyncio.to_thread(newcomer.reserve, before + (4 << 20), "staging", PATIENCE_S)
            assert newcomer.leased_bytes == before + (4 << 20)
        p = prompt(40, 300)
        assert await rig.ask(handle, tokenized("", p, NEW)) == rig.reference("demo-llama", p, NEW)
