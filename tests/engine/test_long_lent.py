"""Prompts larger than their device with their KV in what another device lends, of every kind, and over two devices."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prism.core.settings import LongPromptPlace
from prism.engine.handle import EngineHandle
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import drop_host_pool, host_pool_directory
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from tests.engine.rig import DEVICE_BYTES, Rig, codec, prompt, reference, tokenized, until_died
from tests.patience import happens

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BOUND = 64 << 20
PAGES = 6
"""Of KV that the device gives: 192 tokens of the wide model."""
LONG = 500
SLOW = DeclaredLinks(host=1.6e7, peer=5e7)
"""A prompt of LONG tokens, 32 MB of KV, takes seconds: what a test does in its middle is done before it is there. Host
memory is too slow to be dealt a part of it."""
FAST = DeclaredLinks(host=1e9, peer=1e10)
BOTH = DeclaredLinks(host=5e8, peer=1e9)
"""Units are dealt over the lender and host memory."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": True},
    "seeded": {"temperature": 1.0, "sampling_seed": 7, "top_p": 0.9, "top_k": 50},
    "another choice of it": {"temperature": 1.0, "sampling_seed": 8, "top_p": 0.9, "top_k": 50},
    "grammar": {"regex": "[a-z ]{90,100}", "ignore_eos": False},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3},
}


@pytest.fixture
async def tiers(rig: Rig) -> AsyncIterator[HostPool]:
    """The second device lends to the first."""
    accounts = rig.folder / "accounts"
    declare(rig, SLOW)
    offer(rig, True)
    yield HostPool(host_pool_directory(accounts), BOUND)
    drop_host_pool(accounts)


def declare(rig: Rig, links: DeclaredLinks) -> None:
    """The links of engines that begin from now on."""
    everywhere = {f"host:{i}": links for i in range(2)}
    place = LongPromptPlace.LENT
    found = KvSettings(host_bytes=BOUND, lend_keep_fraction=0.1, long_prompts=place, links=everywhere)
    write_kv_settings(rig.folder / "accounts", found)


def offer(rig: Rig, lends: bool) -> None:
    rig.pool.memory[rig.devices[1]].offer(DEVICE_BYTES // 10 if lends else None)


def lent_bytes(rig: Rig) -> int:
    return sum(owner.lent_bytes for owner in rig.pool.memory[rig.devices[1]].stats().owners)


async def small(rig: Rig, model: Path, devices: int = 1) -> EngineHandle:
    """An engine with PAGES of KV."""
    limit = PAGES * rig.pool.memory[rig.devices[0]].page_bytes // devices
    where = rig.devices[:devices]
    handle = await rig.activate(rig.spec_at(model, tp=devices), where, kv_limit_bytes=limit)
    assert handle.max_request_tokens > LONG
    return handle


def said(rig: Rig, rid: str) -> list[float]:
    """The log-probabilities of prompt and answer."""
    extras = [codec()._extra_decoder.decode(item.extra) for item in rig.items[rid] if item.extra]
    lists = [values or [] for extra in extras for values in (extra.input_val, extra.output_val)]
    return [value for values in lists for value in values if value is not None]


@pytest.mark.parametrize("links", [FAST, BOTH])
async def test_every_kind_of_request_is_answered_as_on_a_device_with_room(
    rig: Rig, tiers: HostPool, wide_model: Path, links: DeclaredLinks
) -> None:
    declare(rig, links)
    asked = prompt(3, LONG)
    answers: list[dict[str, list[int]]] = []
    chances: list[list[float]] = []
    for number, handle in enumerate([await small(rig, wide_model), None]):
        handle = handle or await rig.activate(rig.spec_at(wide_model), [rig.devices[0]])
        rids = {kind: rig.submit(handle, tokenized("", asked, 40, **how)) for kind, how in KINDS.items()}
        if number == 0:
            await happens(lambda: lent_bytes(rig) > 0, "KV at the lender")
            await happens(
                lambda: (links is BOTH) == bool(tiers.claims()), "KV in host memory only where it is dealt some"
            )
        answers.append({kind: await rig.answer(rid) for kind, rid in rids.items()})
        chances.append(said(rig, rids["greedy"]))
        await handle.deactivate()
    assert answers[0] == answers[1]
    assert answers[0]["seeded"] != answers[0]["another choice of it"]
    assert len(chances[0]) >= LONG
    assert chances[0] == pytest.approx(chances[1], abs=1e-3)
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert tiers.use().booked_bytes == tiers.use().file_bytes, "only what is kept for the next turn"


async def begin(rig: Rig, handle: EngineHandle, asked: tuple[int, ...], new: int) -> str:
    """A long request whose prompt is in the middle, with KV at the lender."""
    rid = rig.submit(handle, tokenized("", asked, new))
    await happens(lambda: lent_bytes(rig) > 0, "KV at the lender")
    return rid


async def test_a_lender_that_dies_or_wants_its_memory_back_in_mid_prompt_changes_no_token(
    rig: Rig, tiers: HostPool, wide_model: Path
) -> None:
    lender = await rig.activate(rig.spec("demo-qwen3"), [rig.devices[1]])
    handle = await small(rig, wide_model)
    asked = prompt(3, LONG)
    rid = await begin(rig, handle, asked, 2)
    assert tiers.claims() == {}, "the lender has room for all of it"
    os.kill(lender.pids[0], signal.SIGKILL)
    await until_died(lender)
    assert await rig.answer(rid) == reference(wide_model, asked, 2), "the lender's engine died, not what it lent"
    await happens(lambda: lent_bytes(rig) == 0, "what was lent to be given back")
    rid = await begin(rig, handle, asked, 4)
    offer(rig, False)
    await happens(lambda: lent_bytes(rig) == 0, "what its lender wants back")
    assert tiers.claims().keys() == {wide_model.name}, "it goes on over host memory"
    assert await rig.answer(rid) == reference(wide_model, asked, 4)
    await happens(lambda: tiers.claims() == {}, "what was claimed to be given back")

    offer(rig, True)
    rid = await begin(rig, handle, asked, 2)
    full = tiers.claim(tiers.claimable_bytes(), "somebody")
    assert full is not None
    offer(rig, False)
    await happens(lambda: lent_bytes(rig) == 0, "what its lender wants back, which has nowhere to go")
    full.close()
    assert await rig.answer(rid) == reference(wide_model, asked, 2), "it was computed again"
    await handle.deactivate()
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert tiers.use().booked_bytes == 0


async def test_a_borrower_killed_in_mid_prompt_leaves_nothing_with_its_lender(
    rig: Rig, tiers: HostPool, wide_model: Path
) -> None:
    handle = await small(rig, wide_model)
    asked = prompt(3, LONG)
    await begin(rig, handle, asked, 12)
    os.kill(handle.pids[0], signal.SIGKILL)
    await until_died(handle)
    for device in rig.devices:
        rig.pool.memory[device].reap()
    assert lent_bytes(rig) == 0
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    offer(rig, False)
    handle = await small(rig, wide_model)
    rig.submit(handle, tokenized("", asked, 12))
    await happens(lambda: tiers.claims().get(wide_model.name, 0) > 0, "KV in host memory")
    os.kill(handle.pids[0], signal.SIGKILL)
    await until_died(handle)
    assert tiers.claims() == {}
    assert tiers.use().booked_bytes == 0
