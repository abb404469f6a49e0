"""Models that answer with vectors or scores: equal to Hugging Face when loaded, and again from their image."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism.config.adapters import adapter_mark
from prism.config.model_files import announced
from prism.core.specs import LoraRoom, ModelSpec
from prism.engine.handle import EngineHandle
from prism.wire.adapters import AdapterRef
from scripts.make_demo_adapter import make_adapter
from tests.engine.adapters import merged
from tests.engine.rig import Rig, codec, prompt, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
    "initializer_range": 0.1,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
DECODER_POOLING = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@dataclasses.dataclass(frozen=True)
class Family:
    """``auto``: the class of transformers that makes it; ``pool``: which token is the text, None for scores."""

    config: str
    auto: str
    pool: int | None = None
    more: dict[str, Any] = dataclasses.field(default_factory=dict)


FAMILIES = {
    "embed-qwen3": Family("Qwen3", "AutoModelForCausalLM", -1, GROUPED),
    "embed-bert": Family("Bert", "AutoModel", 0),
    "embed-xlm-roberta": Family("XLMRoberta", "AutoModel", 0),
    "classify-llama": Family("Llama", "AutoModelForSequenceClassification", None, {**GROUPED, "num_labels": 3}),
    "classify-qwen3": Family("Qwen3", "AutoModelForSequenceClassification", None, {**GROUPED, "num_labels": 3}),
    "rerank-bert": Family("Bert", "AutoModelForSequenceClassification", None, {"num_labels": 1}),
    "rerank-xlm-roberta": Family("XLMRoberta", "AutoModelForSequenceClassification", None, {"num_labels": 1}),
}
QUICK = ("embed-qwen3", "rerank-bert")
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]


def make_model(name: str, folder: Path, like: Path) -> Path:
    """A tiny model of the family with random weights, and the tokenizer of the model ``like``."""
    import torch
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, f"{family.config}Config")(**SMALL, **family.more)
    torch.manual_seed(5)
    model = getattr(transformers, family.auto).from_config(config)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            torch.nn.init.uniform_(parameter, 0.1, 0.5)
    model.save_pretrained(folder)
    if name == "embed-qwen3":
        (folder / "modules.json").write_text(json.dumps(DECODER_POOLING))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    for file in TOKENIZER:
        if (like / file).exists():
            shutil.copy(like / file, folder)
    return folder


def reference(name: str, folder: Path, ids: Sequence[int], types: Sequence[int] | None) -> np.ndarray[Any, Any]:
    """What Hugging Face makes of the tokens."""
    import torch
    import transformers

    torch.set_num_threads(1)
    family = FAMILIES[name]
    auto = "AutoModel" if family.pool is not None else family.auto
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    more = {"token_type_ids": torch.tensor([list(types)])} if types is not None else {}
    with torch.no_grad():
        out = model(torch.tensor([list(ids)]), **more)
    if family.pool is None:
        return np.asarray(out.logits[0])
    vector = out.last_hidden_state[0, family.pool]
    return np.asarray(vector / vector.norm())


def wanted(ids: Sequence[int], types: Sequence[int] | None = None, dimensions: int | None = None) -> Any:
    """SGLang's tokenized request for a vector."""
    codec()
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput

    return TokenizedEmbeddingReqInput(
        rid="",
        input_text=None,
        input_ids=array("q", ids),
        mm_inputs=None,
        token_type_ids=None if types is None else list(types),
        sampling_params=tokenized("", ids, 0).sampling_params,
        dimensions=dimensions,
    )


def spec_of(rig: Rig, path: Path, **engine_args: Any) -> ModelSpec:
    return dataclasses.replace(rig.spec_at(path, **engine_args), kind=announced(str(path), path.parent)[1])


async def values(rig: Rig, handle: EngineHandle, request: Any) -> np.ndarray[Any, Any]:
    rid = rig.submit(handle, request)
    assert await rig.answer(rid) == []
    [item] = rig.items[rid]
    assert item.finish is not None and item.finish["type"] != "abort", item.finish
    return np.frombuffer(codec().unpack_vector(item.extra), "<f4")


@pytest.mark.parametrize("name", ALL)
async def test_equal_at_first_and_from_the_image(rig: Rig, tmp_path: Path, name: str) -> None:
    path = make_model(name, tmp_path / name, rig.models / "demo-llama")
    spec = spec_of(rig, path)
    assert spec.kind == name.partition("-")[0]
    texts = [prompt(seed, length) for seed, length in enumerate((3, 40, 200))]
    types = [0] * 20 + [1] * 20 if FAMILIES[name].config == "Bert" else None
    for from_image in (False, True):
        free_bytes = rig.free_bytes()
        handle = await rig.activate(spec, [rig.devices[0]])
        try:
            assert handle.info.from_image is from_image
            rows = [values(rig, handle, wanted(ids, types if len(ids) == 40 else None)) for ids in texts]
            for ids, row in zip(texts, rows, strict=True):
                expected = reference(name, path, ids, types if len(ids) == 40 else None)
                np.testing.assert_allclose(await row, expected, rtol=2e-4, atol=2e-5)
        finally:
            await handle.deactivate()
        assert rig.free_bytes() == free_bytes


async def test_a_batch_of_inputs_dimensions_and_what_no_engine_may_die_of(rig: Rig, tmp_path: Path) -> None:
    path = make_model("embed-qwen3", tmp_path / "m", rig.models / "demo-llama")
    matryoshka = {"json_model_override_args": json.dumps({"is_matryoshka": True})}
    handle = await rig.activate(spec_of(rig, path, **matryoshka), [rig.devices[0]])
    texts = [prompt(seed, 5 + 7 * seed) for seed in range(20)]
    rids = [rig.submit(handle, wanted(ids)) for ids in texts]
    refused = [rig.submit(handle, r) for r in (wanted([]), wanted([5000]), wanted([1], None, 65), tokenized("", [1]))]
    short = await values(rig, handle, wanted(texts[0], None, 16))
    for ids, rid in zip(texts, rids, strict=True):
        await rig.answer(rid)
        found = np.frombuffer(codec().unpack_vector(rig.items[rid][0].extra), "<f4")
        np.testing.assert_allclose(found, reference("embed-qwen3", path, ids, None), rtol=2e-4, atol=2e-5)
    full = reference("embed-qwen3", path, texts[0], None)[:16]
    np.testing.assert_allclose(short, full / np.linalg.norm(full), rtol=2e-4, atol=2e-5)
    for rid in refused:
        await rig.answer(rid)
        assert (rig.finish[rid]["type"], rig.finish[rid]["status_code"]) == ("abort", 400)
    assert handle.alive
    assert (await happens(lambda: handle.load, "what the engine holds is told")).cached_kv_tokens == 0
    await handle.deactivate()


async def test_adapters_of_models_that_embed(rig: Rig, tmp_path: Path) -> None:
    """Vectors of the base and of its adapters, in the same steps."""
    path = make_model("embed-qwen3", tmp_path / "m", rig.models / "demo-llama")
    folders = {"base": path}
    for seed, name in enumerate(("one", "two", "three")):
        make_adapter(path, tmp_path / name, rank=4, seed=seed)
        folders[name] = merged(path, tmp_path / name, tmp_path / f"{name}-merged")
    room = LoraRoom(slots=2, max_rank=4, modules=("down_proj", "gate_up_proj", "o_proj", "qkv_proj"))
    handle = await rig.activate(dataclasses.replace(spec_of(rig, path), lora=room), [rig.devices[0]])
    rows = {}
    for name in folders:
        request = wanted(prompt(3))
        if name != "base":
            request.lora_id = AdapterRef(name, str(tmp_path / name), adapter_mark(tmp_path / name)).id
        rows[name] = values(rig, handle, request)
    found = dict(zip(rows, await asyncio.gather(*rows.values()), strict=True))
    for name, folder in folders.items():
        expected = reference("embed-qwen3", folder, prompt(3), None)
        np.testing.assert_allclose(found[name], expected, rtol=2e-4, atol=2e-5)
    assert not np.allclose(found["one"], found["base"], atol=1e-2)
    await handle.deactivate()


async def test_a_model_that_generates_answers_with_no_vector(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        rid = rig.submit(handle, wanted([1, 2, 3]))
        await rig.answer(rid)
        assert "generates text" in str(rig.finish[rid]["message"])
        assert await rig.ask(handle, tokenized("", prompt(1), 4)) == rig.reference("demo-llama", prompt(1), 4)
