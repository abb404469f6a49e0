"""Guessed tokens change no answer: n-grams of earlier answers are guessed, several tokens are accepted in a step, and
what comes is what an engine without guesses says, however it draws and wherever it goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prism.core.specs import ModelSpec, Speculation, SpeculativeAlgorithm
from prism.engine.handle import EngineHandle
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized
from tests.engine.test_sampling import CASES
from tests.patience import happens

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BASE = "demo-llama"
NEW = 30
GUESSING = Speculation(SpeculativeAlgorithm.NGRAM, draft_tokens=6, ngrams=1 << 14)


def guessing(rig: Rig) -> ModelSpec:
    return replace(rig.spec(BASE), speculation=GUESSING)


async def ask_again(rig: Rig, handle: EngineHandle, case: str, **sampling: Any) -> tuple[list[int], int]:
    """The answer, and in how many pieces it comes when the engine has given it before."""
    for _ in range(2):
        rig.items.pop(case, None)
        rig.tokens.pop(case, None)
        found = await rig.ask(handle, tokenized(case, prompt(3), NEW, **sampling))
    return found, len([item for item in rig.items[case] if item.token_ids])


async def test_answers_stay_as_they_are(rig: Rig) -> None:
    cases = {"greedy": {}, **CASES, "schema": {**CASES["schema"], "ignore_eos": False}}
    async with rig.engine(BASE, 1) as plain:
        expected = {}
        for case, sampling in cases.items():
            expected[case] = await rig.ask(plain, tokenized(case, prompt(3), NEW, **sampling))
    first = await rig.activate(guessing(rig), [rig.devices[0]])
    pieces = {}
    for case, sampling in cases.items():
        found, pieces[case] = await ask_again(rig, first, case, **sampling)
        assert found == expected[case], case
    assert pieces["penalties"] == len(expected["penalties"]), "one token a step"
    several = {case for case, count in pieces.items() if count <= len(expected[case]) * 2 // 3}
    assert several >= {"greedy", "seeded", "unseeded"}, pieces
    await first.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


async def test_on_the_way(rig: Rig) -> None:
    """Beside each other, resumed behind tokens of another engine, from the image, and with prefixes cached."""
    async with rig.engine(BASE, 1) as plain:
        asked = [(f"r{i}", prompt(i, 20 + 7 * i)) for i in range(6)]
        expected = [await rig.ask(plain, tokenized(rid, p, NEW)) for rid, p in asked]
    second = await rig.activate(guessing(rig), [rig.devices[0]])
    assert second.info.from_image
    for turn in ("first", "again"):
        rids = [rig.submit(second, tokenized(f"{turn}-{rid}", p, NEW)) for rid, p in asked]
        assert [await rig.answer(rid) for rid in rids] == expected, turn
    for (rid, p), answer in zip(asked, expected, strict=True):
        rig.submit(second, tokenized(rid, p, NEW), attempt=1, resumed=answer[:9])
    assert [await rig.answer(rid) for rid, _ in asked] == expected, "resumed"
    await second.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


async def test_guesses_give_way_under_pressure(rig: Rig) -> None:
    """The limit falls to one page while many requests run: retracted ones are answered alike."""
    asked = [(f"p{i}", prompt(20 + i, 80)) for i in range(10)]
    handle = await rig.activate(guessing(rig), [rig.devices[0]])
    for rid, p in asked:
        rig.submit(handle, tokenized(rid, p, 4 * NEW))
    await rig.wait_tokens(asked[-1][0], 3)
    handle.set_kv_limit(2 << 20)
    for rid, p in asked:
        found = await rig.answer(rid)
        if rid in ("p0", "p9"):
            assert found == rig.reference(BASE, p, 4 * NEW)
    await rig.ask(handle, tokenized("", prompt(1), 1))
    await happens(lambda: handle.load and handle.load.retractions > 0, "a retraction that is told")
    held = rig.pool.memory[rig.devices[0]].stats()
    assert sum(owner.kv_bytes for owner in held.owners) <= 2 << 20
    await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES
