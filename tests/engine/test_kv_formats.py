"""KV in other formats: 8-bit numbers with scales, and pages of several tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prism.engine.handle import EngineHandle
from sglang_patches.kv_pool import restore_kv_scales
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
NEW = 24
PAGE = 16


async def start(rig: Rig, path: Path, **engine_args: Any) -> EngineHandle:
    return await rig.activate(rig.spec_at(path, **engine_args), [rig.devices[0]])


async def retract(rig: Rig, handle: EngineHandle) -> list[list[int]]:
    """The limit falls to a page while many requests run; the first of them are answered as they are alone, which is
    what is told."""
    asked = [prompt(50 + i, 80) for i in range(24)]
    many = [rig.submit(handle, tokenized("", p, 3 * NEW)) for p in asked]
    await rig.wait_tokens(many[-1], 3)
    handle.set_kv_limit(2 << 20)
    answers = [await rig.answer(rid) for rid in many]
    assert all(len(answer) == 3 * NEW for answer in answers)
    alone = [await rig.ask(handle, tokenized("", p, 3 * NEW)) for p in asked[:4]]
    assert answers[:4] == alone
    await happens(lambda: handle.load and handle.load.retractions > 0, "a retraction that is told")
    held = rig.pool.memory[rig.devices[0]].stats()
    assert sum(owner.kv_bytes for owner in held.owners) <= 2 << 20
    return alone


async def test_eight_bit_kv_takes_a_quarter_and_answers_alike_after_reactivation(rig: Rig) -> None:
    path = rig.models / "demo-llama"
    plain = await start(rig, path)
    token_bytes = plain.info.kv_bytes_per_token
    await plain.deactivate()
    prompts = [prompt(seed, 40) for seed in (1, 2, 3)]
    found = []
    for together in (False, True):
        handle = await start(rig, path, kv_cache_dtype="fp8_e4m3")
        assert 4 * handle.info.kv_bytes_per_token == token_bytes
        if together:
            rids = [rig.submit(handle, tokenized("", p, NEW)) for p in prompts]
            found.append([await rig.answer(rid) for rid in rids])
        else:
            found.append([await rig.ask(handle, tokenized("", p, NEW)) for p in prompts])
            resumed = rig.submit(handle, tokenized("resumed", prompts[0], NEW), attempt=1, resumed=found[0][0][:7])
            assert await rig.answer(resumed) == found[0][0]
            assert rig.items[resumed][-1].cached_tokens > 30, "its prompt is cached"
            await retract(rig, handle)
            assert [await rig.ask(handle, tokenized("", p, NEW)) for p in prompts] == found[0]
        await handle.deactivate()
    assert found[0] == found[1] and all(len(answer) == NEW for answer in found[0])
    assert rig.free_bytes() == DEVICE_BYTES


async def test_pages_of_tokens_answer_alike_and_go_when_they_are_not_needed(rig: Rig) -> None:
    path, base = rig.models / "demo-llama", prompt(5, 60)
    family = [base, base[:40], (*base, 11, 12, 13), (*base[:50], 99, 98), *(prompt(30 + i, 5 + i) for i in range(4))]
    handle = await start(rig, path, page_size=PAGE)
    for _ in range(2):  # the second time, whole pages are cached
        rids = [rig.submit(handle, tokenized("", p, NEW)) for p in family]
        for rid, p in zip(rids, family, strict=True):
            assert await rig.answer(rid) == reference(path, p, NEW)
    assert any(item.cached_tokens >= 48 for rid in rids for item in rig.items[rid])
    whole = reference(path, base, NEW)
    resumed = rig.submit(handle, tokenized("resumed", base, NEW), attempt=1, resumed=whole[:7])
    assert await rig.answer(resumed) == whole
    alone = await retract(rig, handle)
    assert alone[:2] == [reference(path, prompt(50 + i, 80), 3 * NEW) for i in range(2)]
    await handle.deactivate()
    assert rig.free_bytes() == DEVICE_BYTES


def test_scales_of_an_image_are_numbers_again() -> None:
    """SGLang's attention reads the scales as numbers, which it makes of tensors only when it loads a checkpoint."""
    import torch

    layer = torch.nn.Module()
    layer.k_scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    layer.v_scale = torch.nn.Parameter(torch.tensor(0.25), requires_grad=False)
    layer.k_scale_float = layer.v_scale_float = None
    other = torch.nn.Module()
    other.k_scale = None
    restore_kv_scales(torch.nn.ModuleList([layer, other]))
    assert (layer.k_scale_float, layer.v_scale_float) == (0.5, 0.25)
    assert not hasattr(other, "k_scale_float")
