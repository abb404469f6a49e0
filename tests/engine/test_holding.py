"""A real engine that stands still for its neighbours: no decode step meanwhile, prompts all the same, and every token
as if nothing had happened."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.engine.rig import Rig, prompt, tokenized
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.engine
NEW = 300
FOR_LONG_S = 2 * PATIENCE_S
"""Until a test ends it. It begins before the answer does, which could be whole at any later time."""


async def stands(rig: Rig, rid: str) -> int:
    """Waits until nothing has come for a while, which is soon: steps take milliseconds. How many tokens there are."""
    async with asyncio.timeout(PATIENCE_S):
        before = -1
        while len(rig.tokens[rid]) != before:
            before = len(rig.tokens[rid])
            await asyncio.sleep(0.3)
    return before


async def test_an_answer_that_was_held_is_the_same_and_prompts_come_in_meanwhile(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        whole = rig.reference("demo-llama", prompt(3), NEW)
        handle.hold(FOR_LONG_S)
        rid = rig.submit(handle, tokenized("held", prompt(3), NEW))
        await rig.wait_tokens(rid, 1)
        assert await stands(rig, rid) < NEW and rid not in rig.finish
        other = rig.submit(handle, tokenized("other", prompt(4), 40))
        await rig.wait_tokens(other, 1)
        assert await stands(rig, other) < 40, "it is held with the others behind its prompt"
        handle.hold(0.0)
        assert await rig.answer(other) == rig.reference("demo-llama", prompt(4), 40)
        for _ in range(5):
            handle.hold(0.02)
            await asyncio.sleep(0.03)
        assert await rig.answer(rid) == whole


async def test_a_pause_ends_by_itself(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        began_s = time.monotonic()
        handle.hold(0.5)  # before it is asked, or the answer may have been whole by then
        rid = rig.submit(handle, tokenized("short", prompt(5), 60))
        assert await rig.answer(rid) == rig.reference("demo-llama", prompt(5), 60)
        assert time.monotonic() - began_s >= 0.45


async def test_who_is_held_can_be_aborted_and_leave(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        handle.hold(FOR_LONG_S)
        rid = rig.submit(handle, tokenized("gone", prompt(6), NEW))
        await rig.wait_tokens(rid, 1)
        handle.abort(rid)
        await asyncio.sleep(0.2)
        handle.hold(0.0)
        await rig.answer(rid)
        assert rig.finish[rid]["type"] == "abort"
        last = rig.submit(handle, tokenized("last", prompt(7), NEW))
        await rig.wait_tokens(last, 3)
        handle.hold(60.0)
