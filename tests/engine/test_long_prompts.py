"""Prompts whose KV is larger than their device: the right tokens, beside others, and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prism.core.settings import LongPromptPlace
from prism.kv.host_pool import HostPool, drop_host_pool, host_pool_directory
from prism.kv.settings import KvSettings, write_kv_settings
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
BOUND = 64 << 20
PAGES = 6
"""Of KV that the device gives: 192 tokens of the wide model."""
LONG = 500


@pytest.fixture
async def tiers(rig: Rig) -> AsyncIterator[HostPool]:
    accounts = rig.folder / "accounts"
    write_kv_settings(accounts, KvSettings(host_bytes=BOUND, long_prompts=LongPromptPlace.HOST))
    yield HostPool(host_pool_directory(accounts), BOUND)
    drop_host_pool(accounts)


def claimed(tiers: HostPool) -> int:
    """Bytes that are not pieces kept for anybody."""
    use = tiers.use()
    return use.booked_bytes - use.file_bytes


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
