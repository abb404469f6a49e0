"""Quantised checkpoints on a CPU, through SGLang's own quantised layers. Answers are those of SGLang by itself where it
computes the format on a CPU; else those of Hugging Face's model that computes as the checkpoint means, but for what 16
bits cost. They are the same from the image, on another device beside another model, and after memory has shrunk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from prism.engine.handle import EngineHandle
from tests.engine.families import named
from tests.engine.quantised_models import FORMATS, make_checkpoint, make_gpt_oss
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized
from tests.engine.stock import stock_answers

pytestmark = pytest.mark.engine
NEW: Final = 8
PROMPTS: Final = (prompt(3, 6), prompt(4, 45))
LONG: Final = tuple(prompt(31 + i, 100) for i in range(3))
PAGE_BYTES: Final = 2 << 20
QUICK: Final = ("compressed-int8",)
_SLOW: Final = [name for name in FORMATS if name not in QUICK]
BATCHES: Final = [
    QUICK,
    *(pytest.param(tuple(_SLOW[i : i + 7]), marks=pytest.mark.slow) for i in range(0, len(_SLOW), 7)),
]


@pytest.mark.parametrize("names", BATCHES, ids="-".join)
async def test_answers(rig: Rig, tmp_path: Path, names: tuple[str, ...]) -> None:
    models = {name: make_checkpoint(FORMATS[name], tmp_path / name, rig.models / "demo-llama") for name in names}
    own = await by_itself(tmp_path, [name for name in names if FORMATS[name].stock])
    async with rig.engine("demo-qwen3", 1) as neighbour:
        for name, model in models.items():
            path = tmp_path / name
            first = await first_time(rig, path, name)
            if name in own:
                assert first == own[name], name
            else:
                found = [shortfall(model, *pair) for pair in zip(PROMPTS, first, strict=True)]
                assert max(found) < FORMATS[name].near, f"{name}: {first}"
                assert shortfall(model, PROMPTS[0], first[1]) > FORMATS[name].near, "any answer would do"
            beside = rig.submit(neighbour, tokenized("", prompt(7), 60))
            await elsewhere_under_pressure(rig, path, name, first)
            assert await rig.answer(beside) == rig.reference("demo-qwen3", prompt(7), 60)
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


async def by_itself(folder: Path, names: list[str]) -> dict[str, list[list[int]]]:
    """What SGLang without Prism answers."""
    works = [{"path": str(folder / n), "engine": FORMATS[n].engine, "prompts": PROMPTS, "new": NEW} for n in names]
    return dict(zip(names, await asyncio.to_thread(stock_answers, works), strict=True)) if works else {}


@pytest.mark.slow
async def test_mxfp4_answers_like_the_weights_that_it_means(rig: Rig, tmp_path: Path) -> None:
    """Its experts are made 16-bit when they are loaded, once: the image has them so."""
    small, plain = make_gpt_oss(tmp_path, rig.models / "demo-llama")
    engine, prompts = named("GptOss").engine, (prompt(3, 6), prompt(4, 20))
    found = []
    for path, device, from_image in ((plain, 0, False), (small, 0, False), (small, 1, True)):
        handle = await rig.activate(rig.spec_at(path, **engine), [rig.devices[device]])
        assert handle.info.from_image is from_image
        found.append(await ask(rig, handle, prompts))
        await handle.deactivate()
    assert found[0] == found[1] == found[2]


async def first_time(rig: Rig, path: Path, name: str) -> list[list[int]]:
    handle = await rig.activate(rig.spec_at(path, **FORMATS[name].engine), [rig.devices[0]])
    assert not handle.info.from_image, name
    first = await ask(rig, handle, PROMPTS)
    await handle.deactivate()
    return first


async def elsewhere_under_pressure(rig: Rig, path: Path, name: str, first: list[list[int]]) -> None:
    handle = await rig.activate(rig.spec_at(path, **FORMATS[name].engine), [rig.devices[1]])
    assert handle.info.from_image, name
    assert await ask(rig, handle, PROMPTS) == first, f"{name}: from its image"
    rids = [rig.submit(handle, tokenized("", asked, NEW)) for asked in LONG]
    await rig.wait_tokens(rids[-1], 1)
    handle.set_kv_limit(PAGE_BYTES)
    for rid in rids:
        assert len(await rig.answer(rid)) == NEW, f"{name}: under pressure"
    assert await ask(rig, handle, PROMPTS) == first, f"{name}: after pressure"
    await handle.deactivate()


async def ask(rig: Rig, handle: EngineHandle, prompts: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    return [await rig.ask(handle, tokenized("", asked, NEW)) for asked in prompts]


def shortfall(model: Any, asked: tuple[int, ...], answer: list[int]) -> float:
    """By how much, at most, a token of ``answer`` is less likely than the likeliest one there (log-probabilities)."""
    with torch.no_grad():
        logits = model(torch.tensor([[*asked, *answer]])).logits[0, len(asked) - 1 : -1]
    said = torch.log_softmax(logits, -1)
    return float((said.amax(-1) - said.gather(1, torch.tensor(answer).view(-1, 1)).view(-1)).max())
