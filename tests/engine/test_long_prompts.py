"""Prompts whose KV is larger than their device: the right tokens, beside others, and nothing is left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism.config.adapters import adapter_mark
from prism.core.specs import LoraRoom
from prism.kv.host_pool import HostPool
from prism.wire.adapters import AdapterRef
from scripts.make_demo_adapter import make_adapter
from tests.engine.adapters import merged
from tests.engine.families import FAMILIES, make_model
from tests.engine.long_tiers import PAGES, claimed
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
LONG = 500
LOOKS, LOOK_S = 100, 0.01
"""An engine at rest looks ten times a second whether others want its memory."""


async def test_prompts_larger_than_the_device_are_answered_as_on_a_large_one(
    rig: Rig, tiers: HostPool, wide_model: Path
) -> None:
    limit = PAGES * rig.pool.memory[rig.devices[0]].page_bytes
    handle = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]], kv_limit_bytes=limit)
    asked, short = prompt(3, LONG), prompt(4, 40)
    try:
        assert handle.max_request_tokens > LONG
        before = [rig.submit(handle, tokenized("", prompt(6 + i, 40), 40)) for i in range(4)]  # not all at once
        assert await rig.wait_tokens(before[0], 2)
        first = rig.submit(handle, tokenized("", asked, 20))
        beside = [rig.submit(handle, tokenized("", prompt(4 + i, 40), 12)) for i in range(2)]
        assert await rig.answer(first) == reference(wide_model, asked, 20)
        assert await rig.answer(beside[0]) == reference(wide_model, short, 12)
        assert await rig.answer(beside[1]) == reference(wide_model, prompt(5, 40), 12)
        for i, earlier in enumerate(before):
            assert await rig.answer(earlier) == reference(wide_model, prompt(6 + i, 40), 40)
        almost = rig.submit(handle, tokenized("", prompt(20, 150), 30))  # nearly as large, but not long
        assert await rig.answer(almost) == reference(wide_model, prompt(20, 150), 30)
        leaves = rig.submit(handle, tokenized("", asked, 400))
        assert await rig.wait_tokens(leaves, 2)
        assert claimed(tiers) > 0
        waits = rig.submit(handle, tokenized("", asked, 400))
        handle.abort(waits)
        handle.abort(leaves)
        await rig.answer(waits)
        await rig.answer(leaves)
        assert rig.tokens.get(waits, []) == []
        await happens(lambda: claimed(tiers) == 0, "what was claimed to be given back")
        too_long = rig.submit(handle, tokenized("", prompt(3, 1200), 5))
        await rig.answer(too_long)
        assert "host memory 64.0 MiB" in str(rig.finish[too_long]), "both numbers are told"
    finally:
        await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES
    assert claimed(tiers) == 0


@pytest.mark.slow
async def test_what_needs_the_memory_of_the_window_is_let_in_between_long_prompts_that_follow_each_other(
    rig: Rig, tiers: HostPool, wide_model: Path
) -> None:
    """Two of six pages are the window's, and the ordinary one needs all: it ends before either of the two does."""
    limit = PAGES * rig.pool.memory[rig.devices[0]].page_bytes
    handle = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]], kv_limit_bytes=limit)
    try:
        asked = [prompt(3 + i, LONG) for i in range(2)]
        long = [rig.submit(handle, tokenized("", each, 140)) for each in asked]
        assert await rig.wait_tokens(long[0], 1)
        short = rig.submit(handle, tokenized("", prompt(20, 150), 30))
        for each, rid in zip(asked, long, strict=True):
            assert await rig.answer(rid) == reference(wide_model, each, 140)
        assert await rig.answer(short) == reference(wide_model, prompt(20, 150), 30)
        assert list(rig.finish) == [short, *long], "in the order in which they ended"
        leaves = rig.submit(handle, tokenized("", asked[0], 400))
        assert await rig.wait_tokens(leaves, 1)
        # It needs the window's memory, too: whether that is away or back when the other one ends is not known.
        takes_all = rig.submit(handle, tokenized("", prompt(21, 30), 150))
        assert await rig.wait_tokens(takes_all, 20)
        handle.abort(leaves)
        await rig.answer(leaves)
        assert await rig.answer(takes_all) == reference(wide_model, prompt(21, 30), 150)
    finally:
        await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES
    assert claimed(tiers) == 0


@pytest.mark.slow
async def test_a_neighbour_gets_the_memory_of_the_window_and_the_long_prompt_goes_on_behind_it(
    rig: Rig, tiers: HostPool, wide_model: Path
) -> None:
    """Nothing else is left on the device: before, the neighbour waited until the long prompt had ended."""
    device = rig.pool.memory[rig.devices[0]]
    handle = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]], kv_limit_bytes=PAGES * device.page_bytes)
    neighbour = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]])
    holder = device.register("holder")
    try:
        long = rig.submit(handle, tokenized("", prompt(3, LONG), 160))
        assert await rig.wait_tokens(long, 1)
        holder.reserve(device.free_bytes() // device.page_bytes * device.page_bytes, "weights")
        for number in range(3):
            asked = prompt(40 + number, 40)
            assert await rig.ask(neighbour, tokenized("", asked, 12)) == reference(wide_model, asked, 12)
            assert long not in rig.finish, "the neighbour did not wait for its end"
            before = len(rig.tokens[long])
            await rig.wait_tokens(long, before + 1)
        assert await rig.answer(long) == reference(wide_model, prompt(3, LONG), 160)
    finally:
        holder.close()
        await neighbour.deactivate()
        await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES
    assert claimed(tiers) == 0


@pytest.mark.slow
@pytest.mark.parametrize("config", ["Glm4MoeLite", "DeepseekV3"])
async def test_latent_rows_are_brought_like_any_others(rig: Rig, tiers: HostPool, tmp_path: Path, config: str) -> None:
    """MLA: a token is one row per layer, 227 of them a page; the model attends on rows in every step of a long one."""
    family = next(family for family in FAMILIES if family.name == config)
    family = replace(family, options={**family.options, "num_hidden_layers": 8})
    path = make_model(family, tmp_path / "latent", rig.models / "demo-llama")
    limit = 2 * rig.pool.memory[rig.devices[0]].page_bytes
    handle = await rig.activate(rig.spec_at(path, **family.engine), [rig.devices[0]], kv_limit_bytes=limit)
    try:
        asked = prompt(3, 700)
        long = rig.submit(handle, tokenized("", asked, 8))
        beside = rig.submit(handle, tokenized("", prompt(4, 40), 8))
        assert await rig.answer(long) == reference(path, asked, 8)
        assert await rig.answer(beside) == reference(path, prompt(4, 40), 8)
        await happens(lambda: handle.load is not None and handle.load.long_prompts == 1, "what was long is told")
        too_long = rig.submit(handle, tokenized("", prompt(3, 1500), 5))
        await rig.answer(too_long)
        assert rig.finish[too_long]["type"] == "abort", "longer than the model's context"
    finally:
        await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES
    assert claimed(tiers) == 0


@pytest.mark.slow
async def test_its_adapter_goes_with_it_through_every_step(
    rig: Rig, tiers: HostPool, wide_model: Path, tmp_path: Path
) -> None:
    """In turns with requests of other adapters, more than there are slots for, so that its own has to come back."""
    room = LoraRoom(slots=2, max_rank=8, modules=("down_proj", "gate_up_proj", "o_proj", "qkv_proj"))
    names = ["long", "one", "two"]
    for seed, name in enumerate(names):
        make_adapter(wide_model, tmp_path / name, seed=seed + 1)
        merged(wide_model, tmp_path / name, tmp_path / f"{name}-merged")

    def of(name: str, tokens: tuple[int, ...], new: int) -> Any:
        made, folder = tokenized("", tokens, new), tmp_path / name
        made.lora_id = AdapterRef(name, str(folder), adapter_mark(folder)).id
        return made

    limit = PAGES * rig.pool.memory[rig.devices[0]].page_bytes
    spec = replace(rig.spec_at(wide_model), lora=room)
    handle = await rig.activate(spec, [rig.devices[0]], kv_limit_bytes=limit)
    asked, short = prompt(3, LONG), prompt(4, 40)
    try:
        assert handle.max_request_tokens > LONG and not handle.no_long
        long = [rig.submit(handle, of(name, asked, 30)) for name in ("long", "one")]
        plain = rig.submit(handle, tokenized("", asked, 8))
        assert await rig.wait_tokens(long[0], 1)
        beside = [rig.submit(handle, of(name, short, 20)) for name in ("one", "two")]
        for name, rid in zip(("one", "two"), beside, strict=True):
            assert await rig.answer(rid) == reference(tmp_path / f"{name}-merged", short, 20), name
        for name, rid in zip(("long", "one"), long, strict=True):
            assert await rig.answer(rid) == reference(tmp_path / f"{name}-merged", asked, 30), name
        assert await rig.answer(plain) == reference(wide_model, asked, 8)
    finally:
        await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES
    assert claimed(tiers) == 0


async def test_one_that_waits_alone_is_given_what_its_neighbour_only_caches(
    rig: Rig, tiers: HostPool, wide_model: Path
) -> None:
    device = rig.pool.memory[rig.devices[0]]
    handle = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]], kv_limit_bytes=PAGES * device.page_bytes)
    holder = device.register("holder")
    held_bytes = device.free_bytes() // device.page_bytes * device.page_bytes
    holder.reserve(held_bytes, "kv")
    waits = rig.submit(handle, tokenized("", prompt(2, LONG), 4))
    await happens(lambda: device.wanted_bytes() > 0, "its wish")
    looks = [await asyncio.sleep(LOOK_S, device.wanted_bytes() > 0) for _ in range(LOOKS)]
    assert sum(looks) > LOOKS // 2, "it stands, so that who looks now and then finds it"
    holder.release(held_bytes, "kv")
    holder.close()
    assert await rig.answer(waits) == reference(wide_model, prompt(2, LONG), 4)
    neighbour = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]])
    try:
        for number in range(100):
            if device.free_bytes() < device.page_bytes:
                break
            length = 300 if device.free_bytes() > 12 * device.page_bytes else 10
            await rig.ask(neighbour, tokenized("", prompt(100 + number, length), 1))
        assert device.free_bytes() < device.page_bytes, "nothing is left for the window"
        asked = prompt(3, LONG)
        assert await rig.ask(handle, tokenized("", asked, 4)) == reference(wide_model, asked, 4)
    finally:
        await neighbour.deactivate()
        await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


@pytest.mark.slow
async def test_the_ranks_of_an_engine_take_every_step_of_it_alike(rig: Rig, tiers: HostPool, wide_model: Path) -> None:
    """With one that needs the window's memory beside it, and a neighbour on one of the two devices, whose ranks have
    different room then."""
    limit = PAGES // 2 * rig.pool.memory[rig.devices[0]].page_bytes
    handle = await rig.activate(rig.spec_at(wide_model, tp=2), rig.devices, kv_limit_bytes=limit)
    neighbour = await rig.activate(rig.spec("demo-llama"), [rig.devices[1]])
    try:
        assert handle.max_request_tokens > LONG
        asked = [prompt(3 + i, LONG) for i in range(2)]
        long = [rig.submit(handle, tokenized("", each, 60)) for each in asked]
        assert await rig.wait_tokens(long[0], 1)
        short = rig.submit(handle, tokenized("", prompt(20, 120), 30))
        beside = rig.submit(neighbour, tokenized("", prompt(5, 60), 30))
        for each, rid in zip(asked, long, strict=True):
            assert await rig.answer(rid) == reference(wide_model, each, 60)
        assert await rig.answer(short) == reference(wide_model, prompt(20, 120), 30)
        assert await rig.answer(beside) == rig.reference("demo-llama", prompt(5, 60), 30)
        assert rig.finish.keys() == {*long, short, beside}
        leaves = rig.submit(handle, tokenized("", asked[0], 400))
        assert await rig.wait_tokens(leaves, 2)
        handle.abort(leaves)
        await rig.answer(leaves)
    finally:
        await neighbour.deactivate()
        await handle.deactivate()
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert claimed(tiers) == 0
