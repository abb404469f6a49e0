"""Prompts larger than their device, of models whose layers see the last tokens only, or keep KV in eight bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism.kv.host_pool import HostPool
from tests.engine.families import FAMILIES, TRITON, make_model
from tests.engine.long_tiers import PAGES, claimed
from tests.engine.plain_families import EVERYDAY
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine


def eager_model(path: Path) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more", "engine", "pages", "tp"),
    [
        ("Gemma2", {"head_dim": 256, "attn_logit_softcapping": 5.0}, TRITON, PAGES, 1),
        ("Gemma3Text", {"head_dim": 256}, {}, PAGES, 1),
        ("Olmo3", {"hidden_size": 512}, {}, PAGES // 2, 1),
        ("GptOss", {"head_dim": 128}, {"disable_hybrid_swa_memory": True}, PAGES // 2, 1),
        ("GptOss", {"head_dim": 128}, {}, PAGES // 2, 1),
        ("Mellum", {"head_dim": 256}, {"disable_hybrid_swa_memory": True}, PAGES, 1),
        ("Mellum", {"head_dim": 256}, {}, PAGES // 2, 1),
        ("Gemma2", {"head_dim": 256, "attn_logit_softcapping": 5.0}, TRITON, PAGES, 2),
        ("Gemma3Text", {"head_dim": 256}, {}, PAGES, 2),
        ("Olmo3", {"hidden_size": 1024}, {}, PAGES // 2, 2),
        ("GptOss", {"head_dim": 128}, {"disable_hybrid_swa_memory": True}, PAGES // 2, 2),
        ("GptOss", {"head_dim": 128}, {}, PAGES // 2, 2),
        ("Mellum", {"head_dim": 256}, {}, PAGES // 2, 2),
    ],
)
async def test_layers_that_see_the_last_tokens_only_are_brought_those(
    rig: Rig,
    tiers: HostPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    more: dict[str, Any],
    engine: dict[str, Any],
    pages: int,
    tp: int,
) -> None:
    """Beside layers that see everything. Scores are capped in Gemma-2, gpt-oss has sinks: Hugging Face (but for its
    SDPA) and SGLang's back ends (but for torch's) have both. Over two devices each rank has as many heads as one has
    alone, and its own sinks."""
    monkeypatch.setattr("tests.engine.rig._reference_model", eager_model)
    family = next(family for family in (*EVERYDAY, *FAMILIES) if family.name == config)
    heads = {"num_attention_heads": 4 * tp, "num_key_value_heads": 4 * tp}
    options = family.options | heads | {"sliding_window": 100} | more
    path = make_model(replace(family, options=options), tmp_path / "windows", rig.models / "demo-llama")
    limit = pages * rig.pool.memory[rig.devices[0]].page_bytes
    spec = rig.spec_at(path, tp=tp, **(family.engine | engine))
    handle = await rig.activate(spec, rig.devices[:tp], kv_limit_bytes=limit)
    try:
        assert not handle.no_long
        for i in range(4):  # what is cached of them makes room for the window
            await rig.ask(handle, tokenized("", prompt(30 + i, 100), 1))
        asked = prompt(3, 600)
        assert handle.device_tokens < 600
        long = rig.submit(handle, tokenized("", asked, 40))
        beside = [rig.submit(handle, tokenized("", prompt(4 + i, 150), 20)) for i in range(2)]
        assert await rig.answer(long) == reference(path, asked, 40)
        for i, rid in enumerate(beside):
            assert await rig.answer(rid) == reference(path, prompt(4 + i, 150), 20)
        await happens(lambda: handle.load is not None and handle.load.long_prompts == 1, "what was long is told")
        leaves = rig.submit(handle, tokenized("", asked, 400))
        assert await rig.wait_tokens(leaves, 2)
        assert claimed(tiers) > 0
        handle.abort(leaves)
        await rig.answer(leaves)
        await happens(lambda: claimed(tiers) == 0, "what was claimed to be given back")
    finally:
        await handle.deactivate()
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert claimed(tiers) == 0


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_kv_in_eight_bits_is_answered_as_by_the_same_engine_with_room_for_it(
    rig: Rig, tiers: HostPool, wide_model: Path, kv_cache_dtype: str, tp: int
) -> None:
    """Over two devices each rank has half of the heads, and so twice as many tokens in the same memory."""
    spec, where = rig.spec_at(wide_model, tp=tp, kv_cache_dtype=kv_cache_dtype), rig.devices[:tp]
    asked, short = prompt(3, 600 * tp), prompt(4, 40)
    roomy = await rig.activate(spec, where)
    try:
        assert roomy.device_tokens > len(asked) + 100
        wanted = await rig.ask(roomy, tokenized("", asked, 40)), await rig.ask(roomy, tokenized("", short, 12))
    finally:
        await roomy.deactivate()
    limit = PAGES // 2 * rig.pool.memory[rig.devices[0]].page_bytes
    handle = await rig.activate(spec, where, kv_limit_bytes=limit)
    try:
        assert not handle.no_long and handle.device_tokens < len(asked)
        long = rig.submit(handle, tokenized("", asked, 40))
        beside = rig.submit(handle, tokenized("", short, 12))
        assert (await rig.answer(long), await rig.answer(beside)) == wanted
        await happens(lambda: handle.load is not None and handle.load.long_prompts == 1, "what was long is told")
    finally:
        await handle.deactivate()
    assert rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES
    assert claimed(tiers) == 0


@pytest.mark.slow
async def test_a_model_whose_attention_is_not_made_of_parts_says_so(rig: Rig, tiers: HostPool, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "Gemma4Text")
    options, stored = family.options | {"global_head_dim": 64}, family.stored | {"head_dim": 64}
    family = replace(family, options=options, stored=stored)
    path = make_model(family, tmp_path / "windows", rig.models / "demo-llama")
    limit = PAGES * rig.pool.memory[rig.devices[0]].page_bytes
    handle = await rig.activate(rig.spec_at(path, **family.engine), [rig.devices[0]], kv_limit_bytes=limit)
    try:
        assert handle.no_long == "its layers that see the last tokens only have other heads than those that see all"
        assert handle.device_tokens == 0
    finally:
        await handle.deactivate()
