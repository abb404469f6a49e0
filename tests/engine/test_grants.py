"""Real workers on a device where what they take beside their pages counts, and strangers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prism import memory
from tests.engine.rig import Rig, opened, prompt, tokenized
from tests.patience import LOOK_S, PATIENCE_S

pytestmark = pytest.mark.engine

MIB = 1 << 20
PARKED_BYTES, ACTIVE_BYTES = 4 * MIB, 30 * MIB


@pytest.fixture
async def granting(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    async with opened(zygote, demo_models, parked_bytes=PARKED_BYTES, active_bytes=ACTIVE_BYTES) as rig:
        yield rig


async def until_granted(account: memory.Device, *wanted: int) -> None:
    """Workers are forked in the background."""
    async with asyncio.timeout(PATIENCE_S):
        while sorted(owner.granted_bytes for owner in account.stats().owners) != sorted(wanted):
            await asyncio.sleep(LOOK_S)


async def test_engines_are_granted_their_memory_and_bear_strangers(granting: Rig) -> None:
    account = granting.pool.memory[granting.devices[0]]
    await until_granted(account, PARKED_BYTES)
    question = tokenized("", prompt(3, 60), 30)
    async with granting.engine("demo-llama") as handle:
        await until_granted(account, PARKED_BYTES, ACTIVE_BYTES)
        expected = await granting.ask(handle, question)
        account.note_foreign(account.free_bytes() + 8 * MIB)
        assert account.stats().free_bytes < 0
        answers = await asyncio.gather(*(granting.ask(handle, tokenized("", prompt(3, 60), 30)) for _ in range(4)))
        assert all(answer == expected for answer in answers), "what runs goes on, in what the engine has"
        account.note_foreign(0)
        assert await granting.ask(handle, tokenized("", prompt(3, 60), 30)) == expected
    await until_granted(account, PARKED_BYTES, PARKED_BYTES)
    assert not account.audit().problems
