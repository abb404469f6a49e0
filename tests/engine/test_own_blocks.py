"""A model with large tokens, so that sequences keep KV blocks of their own: answers stay exact, memory goes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized

pytestmark = pytest.mark.engine
NEW = 40
PAGE_BYTES, BLOCK_TOKENS = 2 << 20, 32


async def test_answers_are_exact_and_shared_prefixes_hit(rig: Rig, wide_model: Path) -> None:
    base = prompt(5, 60)
    family = [base, base, base[:40], (*base, 11, 12, 13), (*base[:50], 99, 98), *(prompt(30 + i, 25) for i in range(4))]
    handle = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]])
    try:
        for _ in range(2):  # the second time, prefixes are cached
            rids = [rig.submit(handle, tokenized("", p, NEW)) for p in family]
            for rid, p in zip(rids, family, strict=True):
                assert await rig.answer(rid) == reference(wide_model, p, NEW)
        assert any(item.cached_tokens >= 40 for rid in rids for item in rig.items[rid])
    finally:
        await handle.deactivate()
    assert rig.free_bytes(0) == DEVICE_BYTES


async def test_memory_held_is_what_own_blocks_need_and_a_lowered_limit_is_met(rig: Rig, wide_model: Path) -> None:
    """Six requests of 80 + 40 tokens need four blocks each; the limit then leaves room for one request."""
    prompts = [prompt(20 + i, 80) for i in range(6)]
    handle = await rig.activate(rig.spec_at(wide_model), [rig.devices[0]])
    try:
        rids = [rig.submit(handle, tokenized("", p, NEW)) for p in prompts]
        await rig.wait_tokens(rids[-1], 25)
        owners = rig.pool.memory[rig.devices[0]].stats().owners
        mapped = sum(owner.mapped_bytes - owner.weights_bytes - owner.ahead_bytes for owner in owners)
        blocks = 1 + len(prompts) * -(-(80 + NEW) // BLOCK_TOKENS)
        assert 0 < mapped <= blocks * PAGE_BYTES
        handle.set_kv_limit(5 * PAGE_BYTES)
        await asyncio.gather(*(rig.answer(rid) for rid in rids))
        assert [rig.tokens[rid] for rid in rids] == [reference(wide_model, p, NEW) for p in prompts]
        await rig.ask(handle, tokenized("", prompt(1), 1))
        held = rig.pool.memory[rig.devices[0]].stats()
        assert sum(owner.kv_bytes for owner in held.owners) <= 5 * PAGE_BYTES
    finally:
        await handle.deactivate()
    assert rig.free_bytes(0) == DEVICE_BYTES
