"""Guessed tokens change no answer: n-grams of earlier answers are guessed, or a small model guesses; several tokens are
accepted in a step, and what comes is what an engine without guesses says, however it draws and wherever it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism.core.specs import ModelSpec, Speculation, SpeculativeAlgorithm
from prism.engine.handle import EngineHandle
from tests.engine.drafts import make_eagle, make_eagle3
from tests.engine.rig import DEVICE_BYTES, Rig, codec, prompt, reference, tokenized, until_died
from tests.engine.test_sampling import CASES
from tests.patience import happens

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BASE = "demo-llama"
NEW = 30
KINDS = {
    "ngram": Speculation(SpeculativeAlgorithm.NGRAM, draft_tokens=6, ngrams=1 << 14),
    "eagle": Speculation(SpeculativeAlgorithm.EAGLE, draft_tokens=6, steps=3, branches=2),
    "eagle3": Speculation(SpeculativeAlgorithm.EAGLE3, draft_tokens=4, steps=3, branches=1),
}
pytest_kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def drafts(demo_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a draft of each kind that knows some of what the model says."""
    texts = [(*p, *reference(demo_models / BASE, p, NEW + 10)) for p in map(prompt, range(1, 7))]
    folder = tmp_path_factory.mktemp("drafts")
    make_eagle(demo_models / BASE, folder / "eagle", texts, NEW + 12)
    make_eagle3(demo_models / BASE, folder / "eagle3", texts, NEW + 12)
    return folder


def guessing(rig: Rig, kind: str, drafts: Path) -> ModelSpec:
    how = KINDS[kind]
    return replace(rig.spec(BASE), speculation=how if how.ngrams else replace(how, draft=str(drafts / kind)))


async def ask_again(rig: Rig, handle: EngineHandle, case: str, **sampling: Any) -> tuple[list[int], int]:
    """The answer, and in how many pieces it comes when the engine has given it before."""
    for _ in range(2):
        rig.items.pop(case, None)
        rig.tokens.pop(case, None)
        found = await rig.ask(handle, tokenized(case, prompt(3), NEW, **sampling))
    return found, len([item for item in rig.items[case] if item.token_ids])


@pytest_kinds
async def test_answers_stay_as_they_are(rig: Rig, kind: str, drafts: Path) -> None:
    cases = {"greedy": {}, **CASES, "schema": {**CASES["schema"], "ignore_eos": False}}
    async with rig.engine(BASE, 1) as plain:
        expected = {}
        for case, sampling in cases.items():
            expected[case] = await rig.ask(plain, tokenized(case, prompt(3), NEW, **sampling))
    first = await rig.activate(guessing(rig, kind, drafts), [rig.devices[0]])
    pieces = {}
    for case, sampling in cases.items():
        found, pieces[case] = await ask_again(rig, first, case, **sampling)
        assert found == expected[case], case
    assert pieces["penalties"] == len(expected["penalties"]), "one token a step"
    several = {case for case, count in pieces.items() if count <= len(expected[case]) * 2 // 3}
    assert several >= ({"greedy", "seeded", "unseeded"} if kind == "ngram" else {"greedy"}), pieces
    await first.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


@pytest_kinds
async def test_on_the_way(rig: Rig, kind: str, drafts: Path) -> None:
    """Beside each other, resumed behind tokens of another engine, from the image, and with prefixes cached."""
    async with rig.engine(BASE, 1) as plain:
        asked = [(f"r{i}", prompt(i, 20 + 7 * i)) for i in range(6)]
        expected = [await rig.ask(plain, tokenized(rid, p, NEW)) for rid, p in asked]
    second = await rig.activate(guessing(rig, kind, drafts), [rig.devices[0]])
    assert second.info.from_image
    for turn in ("first", "again"):
        rids = [rig.submit(second, tokenized(f"{turn}-{rid}", p, NEW)) for rid, p in asked]
        assert [await rig.answer(rid) for rid in rids] == expected, turn
    for (rid, p), answer in zip(asked, expected, strict=True):
        rig.submit(second, tokenized(rid, p, NEW), attempt=1, resumed=answer[:9])
    assert [await rig.answer(rid) for rid, _ in asked] == expected, "resumed"
    await second.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


@pytest.mark.parametrize("kind", ["ngram", "eagle"])
async def test_guesses_give_way_under_pressure(rig: Rig, kind: str, drafts: Path) -> None:
    """The limit falls to one page while many requests run: retracted ones are answered alike."""
    asked = [(f"p{i}", prompt(20 + i, 80)) for i in range(10)]
    handle = await rig.activate(guessing(rig, kind, drafts), [rig.devices[0]])
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


@pytest.mark.parametrize("kind", ["ngram", "eagle"])
async def test_log_probabilities_stay_as_they_are(rig: Rig, kind: str, drafts: Path) -> None:
    """Of the chosen tokens and of the likeliest ones, greedy and drawn."""
    asked = {"greedy": {}, "drawn": {"temperature": 0.7, "sampling_seed": 3}, "biased": CASES["logit-bias"]}
    told = []
    async with rig.engine(BASE, 1) as plain:
        told.append({case: await log_probabilities(rig, plain, case, how) for case, how in asked.items()})
    handle = await rig.activate(guessing(rig, kind, drafts), [rig.devices[0]])
    told.append({case: await log_probabilities(rig, handle, case, how) for case, how in asked.items()})
    await handle.deactivate()
    for case in asked:
        (values, tops), (found, found_tops) = told[0][case], told[1][case]
        assert found == pytest.approx(values, abs=1e-4), case
        assert [set(ids) for ids in found_tops] == [set(ids) for ids in tops], case


async def log_probabilities(
    rig: Rig, handle: EngineHandle, case: str, how: dict[str, Any]
) -> tuple[list[float], list[list[int]]]:
    """Of each token of the answer: its own, and the likeliest tokens."""
    decoder = codec()._extra_decoder
    rid = f"logprobs-{case}"
    rig.items.pop(rid, None)
    rig.tokens.pop(rid, None)
    await rig.ask(handle, tokenized(rid, prompt(3), NEW, logprobs=True, **how))
    extras = [decoder.decode(item.extra) for item in rig.items[rid]]
    assert [i for extra in extras for i in extra.output_idx] == rig.tokens[rid]
    return [v for e in extras for v in e.output_val], [ids for e in extras for ids in e.output_top_idx]


async def test_killed_beside_another_model(rig: Rig, drafts: Path) -> None:
    """The answer goes on with an engine that does not guess, nothing of the draft's weights and KV is left on the
    device, and its other model answers all along."""
    asked = prompt(3)
    expected, beside = rig.reference(BASE, asked, 3 * NEW), rig.reference("demo-qwen3", prompt(7), 3 * NEW)
    async with rig.engine("demo-qwen3") as neighbour:
        rig.submit(neighbour, tokenized("beside", prompt(7), 3 * NEW))
        guesses = await rig.activate(guessing(rig, "eagle", drafts), [rig.devices[0]])
        rig.submit(guesses, tokenized("killed", asked, 3 * NEW))
        await rig.wait_tokens("killed", 4)
        died = asyncio.create_task(until_died(guesses))
        os.kill(guesses.pids[0], signal.SIGKILL)
        await died
        async with rig.engine(BASE) as plain:
            if "killed" not in rig.finish:
                rig.submit(plain, tokenized("killed", asked, 3 * NEW), attempt=1, resumed=rig.tokens["killed"])
            assert await rig.answer("killed") == expected
        assert await rig.answer("beside") == beside
    assert rig.free_bytes() == DEVICE_BYTES
