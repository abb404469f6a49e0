"""Families whose parameters are unlike a Llama's: equal to Hugging Face when loaded, and again from their image."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.rig import Rig, prompt, reference, tokenized

pytestmark = pytest.mark.engine
NEW = 24
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "SmolLM3": {},  # its rotary frequencies, a small buffer of the first block, are written last
    "SeedOss": {"head_dim": 32},
    "Ernie4_5": {"head_dim": 32},
    "Apertus": {},  # tensors without dimensions
}


def make_model(family: str, folder: Path, like: Path) -> Path:
    """A tiny model of ``family`` with random weights, and the tokenizer of the model ``like``."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family])
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and "norm" not in name:
            torch.nn.init.uniform_(parameter, 0.1, 0.5)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        if (like / name).exists():
            shutil.copy(like / name, folder)
    return folder


async def answer(rig: Rig, path: Path, asked: tuple[int, ...], from_image: bool, **engine_args: Any) -> list[int]:
    handle = await rig.activate(rig.spec_at(path, **engine_args), [rig.devices[0]])
    try:
        assert handle.info.from_image is from_image
        return await rig.ask(handle, tokenized("", asked, NEW))
    finally:
        await handle.deactivate()


@pytest.fixture
def make(rig: Rig, tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: make_model(family, tmp_path / family.lower(), rig.models / "demo-llama")


@pytest.mark.parametrize("family", FAMILIES)
async def test_equal_at_first_and_from_the_image(rig: Rig, make: Callable[[str], Path], family: str) -> None:
    path, asked = make(family), prompt(3)
    expected = reference(path, asked, NEW)
    assert await answer(rig, path, asked, from_image=False) == expected
    assert await answer(rig, path, asked, from_image=True) == expected


async def test_overrides_of_the_configuration_have_an_image_of_their_own(rig: Rig) -> None:
    path, asked = rig.models / "demo-llama", prompt(4)
    fewer = {"json_model_override_args": json.dumps({"num_hidden_layers": 2})}
    whole = await answer(rig, path, asked, from_image=False)
    half = await answer(rig, path, asked, from_image=False, **fewer)
    assert half != whole == reference(path, asked, NEW)
    assert await answer(rig, path, asked, from_image=True, **fewer) == half
    assert await answer(rig, path, asked, from_image=True) == whole
