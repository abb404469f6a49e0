"""A step for which the device has no room: smaller ones follow, nothing ends but what cannot run alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from prism.engine import launching
from prism.engine.handle import EngineHandle
from sglang_patches.step_width import CALM_STEPS, LEAST_CHUNK_TOKENS, StepWidth
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, tokenized
from tests.patience import happens

NAME, NEW = "demo-llama", 24


def test_a_step_without_room_is_halved_prompts_first() -> None:
    width = StepWidth(2048, 64)
    assert width.failed(rows=40, prefill_tokens=2000) and (width.chunk_tokens, width.rows) == (896, 64)
    assert width.failed(rows=40, prefill_tokens=300) and (width.chunk_tokens, width.rows) == (LEAST_CHUNK_TOKENS, 64)
    assert width.failed(rows=40, prefill_tokens=LEAST_CHUNK_TOKENS) and width.rows == 20
    assert width.failed(rows=3, prefill_tokens=0) and width.rows == 1
    assert not width.failed(rows=1, prefill_tokens=0), "there is no smaller step"
    whole = StepWidth(None, 8)
    assert whole.failed(rows=2, prefill_tokens=4000) and (whole.chunk_tokens, whole.rows) == (None, 1)
    assert not whole.failed(rows=1, prefill_tokens=4000), "a prompt that is prefilled whole"


def test_it_widens_again_after_calm_and_another_failure_counts_anew() -> None:
    width = StepWidth(1024, 6)
    assert not width.found_room() and width.is_full
    width.failed(rows=6, prefill_tokens=0)
    width.failed(rows=3, prefill_tokens=600)
    assert (width.chunk_tokens, width.rows) == (256, 3)
    assert [width.found_room() for _ in range(CALM_STEPS)] == [False] * (CALM_STEPS - 1) + [True]
    assert (width.chunk_tokens, width.rows) == (512, 6)
    for _ in range(CALM_STEPS - 1):
        width.found_room()
    width.failed(rows=5, prefill_tokens=0)
    assert not width.found_room() and (width.chunk_tokens, width.rows) == (512, 2)
    width.widen_fully()
    assert width.is_full


@contextmanager
def room_for(rig: Rig, rows: int, tokens: int) -> Iterator[None]:
    """Steps of the rig's engines fail that are larger."""
    file = rig.folder / "run" / "room"
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"rows": rows, "tokens": tokens}))
    part.rename(file)
    yield
    file.unlink()


@asynccontextmanager
async def engine_without_room(zygote: Path, models: Path, overlap: bool) -> AsyncIterator[tuple[Rig, EngineHandle]]:
    with tempfile.TemporaryDirectory(prefix="prism-n-") as folder:
        rig = Rig(Path(folder), models, zygote, overlap=overlap)
        await rig.start()
        try:
            async with rig.engine(NAME) as handle:
                yield rig, handle
            assert rig.free_bytes() == DEVICE_BYTES
        finally:
            await rig.close()


@pytest.mark.engine
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["overlap", "one-by-one"])
async def test_an_engine_goes_on_without_room(
    zygote: Path, demo_models: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "WORKER_ENTRY", "tests.engine.short_of_memory:main")
    prompts = [prompt(i, length) for i, length in enumerate((30, 90, 400, 30, 700, 60))]
    expected: list[list[int]] = []
    async with engine_without_room(zygote, demo_models, overlap) as (rig, handle):
        expected += [rig.reference(NAME, p, NEW) for p in prompts]
        begun = rig.submit(handle, tokenized("", prompts[0], 20 * NEW))
        await rig.wait_tokens(begun, 2)
        with room_for(rig, rows=2, tokens=256):
            rids = [rig.submit(handle, tokenized("", p, NEW, logprobs=i == 3)) for i, p in enumerate(prompts)]
            rids.append(rig.submit(handle, tokenized("", prompts[1], NEW, regex="[a-z]{4,8}")))
            for rid, tokens in zip(rids[:-1], expected, strict=False):
                assert await rig.answer(rid) == tokens
            assert await rig.answer(rids[-1])
        with room_for(rig, rows=0, tokens=0):
            refused = rig.submit(handle, tokenized("", prompts[1], NEW))
            await rig.answer(refused)
            assert rig.finish[refused]["status_code"] == 503
            assert "the device has no room for a step of this request alone" in str(rig.finish[refused]["message"])
        assert await rig.ask(handle, tokenized("", prompts[2], NEW)) == expected[2]
        await happens(lambda: handle.load and handle.load.retractions > 0, "a retraction that is told")
        assert handle.alive
        handle.abort(begun)
        assert (await rig.answer(begun))[:NEW] == expected[0]
