"""Every family that stock SGLang serves on a CPU: answers equal Hugging Face's (or, where SGLang's are others, those of
SGLang without Prism) the first time, from the image on another device beside another model, and while the engine's
memory shrinks under its requests.

Families follow each other in the same workers, as they do in a server. Those whose attention keeps more than K and V
per token are in `test_layouts.py`.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Final

import pytest

from tests.engine.families import Family, foretold, make_model
from tests.engine.plain_families import EVERY_PLAIN
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.engine.stock import stock_answers

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NEW = 16
Answers = dict[tuple[int, ...], list[int]]
SHORT = prompt(3, 50)
LONG = tuple(prompt(31 + i, 700) for i in range(3))
ASKED = (SHORT, *LONG)
PAGE_BYTES = 2 << 20
"""Holds the tokens of one or two of the long requests."""
_BATCH = 7
BATCHES: Final = [EVERY_PLAIN[i : i + _BATCH] for i in range(0, len(EVERY_PLAIN), _BATCH)]


@pytest.mark.parametrize("families", BATCHES, ids=lambda families: f"{families[0].serves}-{families[-1].serves}")
async def test_answers_are_those_of_hugging_face(rig: Rig, tmp_path: Path, families: tuple[Family, ...]) -> None:
    made = [(family, tmp_path / re.sub(r"\W+", "-", family.serves).lower()) for family in families]
    for family, path in made:
        make_model(family, path, rig.models / "demo-llama")
        assert not foretold(path, family), family.serves
    own = await by_itself([path for family, path in made if not family.like_hugging_face])
    async with rig.engine("demo-qwen3", 1) as neighbour:
        for _, path in made:
            expected = own.get(path) or {each: reference(path, each, NEW) for each in ASKED}
            await first_time(rig, path, expected)
            beside = rig.submit(neighbour, tokenized("", prompt(7), 60))
            await elsewhere_under_pressure(rig, path, expected)
            assert await rig.answer(beside) == rig.reference("demo-qwen3", prompt(7), 60)
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


async def by_itself(paths: list[Path]) -> dict[Path, Answers]:
    """What SGLang without Prism answers."""
    works = [{"path": str(path), "engine": {}, "prompts": ASKED, "new": NEW} for path in paths]
    found = await asyncio.to_thread(stock_answers, works) if works else []
    return {path: dict(zip(ASKED, answers, strict=True)) for path, answers in zip(paths, found, strict=True)}


async def first_time(rig: Rig, path: Path, expected: Answers) -> None:
    handle = await rig.activate(rig.spec_at(path), [rig.devices[0]])
    assert not handle.info.from_image, path.name
    assert await rig.ask(handle, tokenized("", SHORT, NEW)) == expected[SHORT], path.name
    await handle.deactivate()


async def elsewhere_under_pressure(rig: Rig, path: Path, expected: Answers) -> None:
    handle = await rig.activate(rig.spec_at(path), [rig.devices[1]])
    assert handle.info.from_image, path.name
    assert await rig.ask(handle, tokenized("", SHORT, NEW)) == expected[SHORT], path.name
    rids = [rig.submit(handle, tokenized("", asked, NEW)) for asked in LONG]
    await rig.wait_tokens(rids[-1], 2)
    handle.set_kv_limit(PAGE_BYTES)
    for asked, rid in zip(LONG, rids, strict=True):
        assert await rig.answer(rid) == expected[asked], f"{path.name}, under pressure"
    assert await rig.ask(handle, tokenized("", SHORT, NEW)) == expected[SHORT], path.name
    (held,) = (o.kv_bytes for o in rig.pool.memory[rig.devices[1]].stats().owners if o.pid in handle.pids)
    assert held <= PAGE_BYTES, path.name
    await handle.deactivate()
