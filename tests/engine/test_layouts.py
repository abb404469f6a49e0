"""Attention state beyond K and V per token: greedy answers equal Hugging Face's whatever happens to the engine's
memory.

Models, prompts and answers are small: what is compared with SGLang without Prism runs under Triton's interpreter there.
Windows are of 32 tokens, so that slots leave them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prism.engine.handle import EngineHandle
from tests.engine.families import (
    LATENT_ROWS,
    PLAIN,
    REPRESENTS,
    TRITON_ONLY,
    WINDOWS,
    Family,
    foretold,
    make_model,
    named,
)
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized, until_died
from tests.engine.stock import stock_answers
from tests.patience import happens

pytestmark = pytest.mark.engine
NEW = 12
PROMPTS = (prompt(3, 6), prompt(4, 45))
PAGE_BYTES = 2 << 20
GROUPS = {PLAIN: 1, LATENT_ROWS: 1, WINDOWS: 2}
"""Each has a page at least."""

Make = Callable[[Family], Path]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory, demo_models: Path) -> Make:
    made: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("layouts")

    def model(family: Family) -> Path:
        if family.name not in made:
            made[family.name] = make_model(family, folder / family.name.lower(), demo_models / "demo-llama")
        return made[family.name]

    return model


async def start(rig: Rig, path: Path, family: Family, device: int = 0, **engine_args: Any) -> EngineHandle:
    return await rig.activate(rig.spec_at(path, **(family.engine | engine_args)), [rig.devices[device]])


async def answers(rig: Rig, handle: EngineHandle, prompts: tuple[tuple[int, ...], ...], new: int = NEW) -> list[Any]:
    rids = [rig.submit(handle, tokenized("", asked, new)) for asked in prompts]
    return [await rig.answer(rid) for rid in rids]


_told: dict[tuple[Path, tuple[int, ...], int], list[int]] = {}


async def expected(
    rig: Rig, path: Path, family: Family, prompts: tuple[tuple[int, ...], ...], new: int = NEW
) -> list[Any]:
    """What Hugging Face answers, or the same engine with K and V of every token (if it can), one request at a time."""
    if family.like_hugging_face:
        return [reference(path, asked, new) for asked in prompts]
    unknown = [asked for asked in prompts if (path, asked, new) not in _told]
    if unknown:
        handle = await start(rig, path, family, disable_hybrid_swa_memory=family.full_kv)
        for asked in unknown:
            _told[path, asked, new] = await rig.ask(handle, tokenized("", asked, new))
        await handle.deactivate()
    return [_told[path, asked, new] for asked in prompts]


async def first_time(rig: Rig, path: Path, family: Family) -> list[Any]:
    """The first answers, before another model has the same worker."""
    first = await start(rig, path, family)
    assert not first.info.from_image
    found = await answers(rig, first, PROMPTS)
    await first.deactivate()
    assert found == await expected(rig, path, family, PROMPTS)
    async with rig.engine("demo-llama") as between:
        assert between.pids == first.pids
    return found


async def test_first_answer_and_reactivation(rig: Rig, make: Make) -> None:
    family = named(REPRESENTS[LATENT_ROWS])
    path = make(family)
    found = await first_time(rig, path, family)
    again = await start(rig, path, family)
    assert again.info.from_image
    assert await answers(rig, again, PROMPTS) == found
    await again.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


async def compare_with_stock(path: Path, family: Family, found: list[Any]) -> None:
    """SGLang without Prism answers alike, but for a window: where one is full, it shows a decoded token less
    (`sglang_patches/windows.py`)."""
    work = {"path": str(path), "engine": family.engine, "prompts": PROMPTS, "new": NEW}
    (own,) = await asyncio.to_thread(stock_answers, [work])
    compared = NEW if "sliding_window" not in family.options else 1
    assert (found[0], found[1][:compared]) == (own[0], own[1][:compared])


OTHERS = [f.name for f in TRITON_ONLY if f.name != REPRESENTS[LATENT_ROWS]]


@pytest.mark.slow
@pytest.mark.parametrize("config", OTHERS)
async def test_other_families_at_first_and_elsewhere_under_pressure(rig: Rig, make: Make, config: str) -> None:
    """The second time from the image, on another device beside another model, while the limit falls to the least."""
    family, path = named(config), make(named(config))
    assert not foretold(path, family)
    found = await first_time(rig, path, family)
    if not family.like_hugging_face:
        await compare_with_stock(path, family, found)
    async with rig.engine("demo-qwen3", 1) as neighbour:
        again = await start(rig, path, family, device=1)
        assert again.info.from_image
        beside = rig.submit(neighbour, tokenized("", prompt(7), 60))
        rids = [rig.submit(again, tokenized("", asked, NEW)) for asked in PROMPTS]
        await rig.wait_tokens(rids[-1], 2)
        again.set_kv_limit(GROUPS[family.layout] * PAGE_BYTES)
        assert [await rig.answer(rid) for rid in rids] == found
        assert await answers(rig, again, PROMPTS) == found
        held = [o.kv_bytes for o in rig.pool.memory[rig.devices[1]].stats().owners if o.pid in again.pids]
        assert sum(held) <= GROUPS[family.layout] * PAGE_BYTES
        await again.deactivate()
        assert await rig.answer(beside) == rig.reference("demo-qwen3", prompt(7), 60)
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("config", REPRESENTS.values())
async def test_on_another_device_beside_another_model_with_cached_prefixes(rig: Rig, make: Make, config: str) -> None:
    family, path = named(config), make(named(config))
    base = prompt(5, 60)
    asked = (base, base[:40], (*base, 11, 12, 13), (*base[:50], 99, 98))
    alone = await expected(rig, path, family, asked)
    handle = await start(rig, path, family, device=1)
    async with rig.engine("demo-qwen3", 1) as neighbour:
        beside = rig.submit(neighbour, tokenized("", prompt(7), 200))
        assert await answers(rig, handle, asked[:1]) == alone[:1]
        assert await answers(rig, handle, asked) == alone
        assert any(item.cached_tokens >= 39 for items in rig.items.values() for item in items)
        assert await rig.answer(beside) == rig.reference("demo-qwen3", prompt(7), 200)
    await handle.deactivate()
    assert rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("config", REPRESENTS.values())
async def test_resumed_after_the_engine_was_killed(rig: Rig, make: Make, config: str) -> None:
    family, path, asked = named(config), make(named(config)), prompt(6, 40)
    (whole,) = await expected(rig, path, family, (asked,), 3 * NEW)
    first = await start(rig, path, family)
    rid = rig.submit(first, tokenized(f"resume-{config}", asked, 3 * NEW))
    await rig.wait_tokens(rid, 4)
    watching = asyncio.create_task(until_died(first))
    os.kill(first.pids[0], signal.SIGKILL)
    await watching
    second = await start(rig, path, family, device=1)
    if rid not in rig.finish:
        rig.submit(second, tokenized(rid, asked, 3 * NEW), attempt=1, resumed=rig.tokens[rid])
    assert await rig.answer(rid) == whole
    await second.deactivate()
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("config", REPRESENTS.values())
async def test_under_pressure_running_requests_are_retracted(rig: Rig, tmp_path: Path, config: str) -> None:
    """The limit falls to the least an engine can have while requests run: all are answered exactly."""
    family = named(config)
    path = make_model(family, tmp_path / "wide", rig.models / "demo-llama", wide=True)
    asked = tuple(prompt(20 + i, 80) for i in range(3))
    alone = await expected(rig, path, family, asked, 2 * NEW)
    handle = await start(rig, path, family)
    rids = [rig.submit(handle, tokenized("", p, 2 * NEW)) for p in asked]
    await rig.wait_tokens(rids[-1], 2)
    handle.set_kv_limit(GROUPS[family.layout] * PAGE_BYTES)
    assert [await rig.answer(rid) for rid in rids] == alone
    await rig.ask(handle, tokenized("", prompt(1), 1))
    await happens(lambda: handle.load and handle.load.retractions > 0, "a retraction that is told")
    held = rig.pool.memory[rig.devices[0]].stats()
    assert sum(owner.kv_bytes for owner in held.owners) <= GROUPS[family.layout] * PAGE_BYTES
    await handle.deactivate()
    assert rig.free_bytes(0) == DEVICE_BYTES
