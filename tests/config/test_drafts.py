"""What is said of a model that guesses for another before anything is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from prism.config.catalog import load_catalog
from prism.config.drafts import draft_obstacles
from prism.config.engine_args import registries
from prism.config.errors import CatalogError
from prism.config.health import Hub, examine_model
from prism.core.specs import DeviceKind, SpeculativeAlgorithm

EAGLE, EAGLE3 = SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 10,
    "dtype": "float32",
}
TARGET: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
DRAFT: dict[str, Any] = {**SIZES, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
DRAFT3: dict[str, Any] = {
    **DRAFT,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 5,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def write(folder: Path, config: Mapping[str, Any], **tensors: tuple[int, ...]) -> Path:
    """A model of zeros."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder


@pytest.mark.parametrize(
    ("algorithm", "change", "found"),
    [
        (EAGLE, {}, ""),
        (EAGLE, {"hidden_size": 16}, "sees states of 16 elements, the model's have 8"),
        (EAGLE, {"vocab_size": 11}, "knows 11 tokens, the model 10"),
        (EAGLE, {"tie_word_embeddings": True}, "ties its embedding"),
        (EAGLE, {"architectures": ["LlamaForCausalLM"]}, "is a LlamaForCausalLM, not one of"),
        (EAGLE, {"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle,"),
        (EAGLE, {"kv_lora_rank": 4}, "latent attention"),
        (EAGLE, {"num_key_value_heads": 1}, "1 heads of keys, which 2 devices cannot share"),
        (EAGLE3, {}, ""),
        (EAGLE3, {"target_hidden_size": 16}, "sees states of 16 elements"),
        (EAGLE3, {"hidden_size": 16, "target_hidden_size": 8}, ""),
        (EAGLE3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "the model shows [0, 1]"),
        (EAGLE3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "the model shows [1, 2]"),
        (EAGLE3, {"eagle_config": None}, "a model of 4 shows no 3 unasked"),
        (EAGLE3, {"draft_vocab_size": 4}, "does not say which"),
        (EAGLE3, {"draft_vocab_size": None}, ""),
    ],
)
def test_a_draft_fits_or_is_told_why_not(
    tmp_path: Path, algorithm: SpeculativeAlgorithm, change: dict[str, Any], found: str
) -> None:
    config = {**(DRAFT3 if algorithm is EAGLE3 else DRAFT), **change}
    names = {"d2t": (5,)} if config.get("draft_vocab_size") == 5 else {}
    folder = write(tmp_path / "draft", config, fc=(8, 16), **names)
    said = "; ".join(map(str, draft_obstacles(algorithm, TARGET, folder, 2)))
    assert found in said and bool(found) == bool(said)


def test_a_draft_must_say_how_many_tokens_it_guesses(tmp_path: Path) -> None:
    silent = {name: value for name, value in DRAFT3.items() if name != "draft_vocab_size"}
    folder = write(tmp_path / "draft", silent, fc=(8, 16))
    assert "draft_vocab_size" in "; ".join(map(str, draft_obstacles(EAGLE3, TARGET, folder, 1)))


def test_models_that_nobody_can_guess_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", DRAFT3, d2t=(5,))
    other = {**TARGET, "architectures": ["StableLmForCausalLM"]}
    assert "no way to see what StableLmForCausalLM computes" in next(
        map(str, draft_obstacles(EAGLE3, other, folder, 1))
    )
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= set(registries().shows_layers) & set(registries().shares_head)


def catalog(folder: Path, speculative: str) -> Path:
    file = folder / "catalog.yaml"
    file.write_text(f"models: [{{name: m, path: target, speculative: {{{speculative}}}}}]\n")
    return file


@pytest.mark.parametrize(
    ("speculative", "found"),
    [
        ("algorithm: eagle", r"speculative.draft.*required"),
        ("algorithm: ngram, draft: d", r"speculative.draft.*for `eagle` and `eagle3`"),
        ("algorithm: eagle, draft: d, steps: 3, branches: 1, draft_tokens: 5", r"draft_tokens.*must be 4:"),
        ("algorithm: eagle, draft: d, steps: 3, branches: 2, draft_tokens: 12", r"draft_tokens.*from 4 to 11"),
        ("algorithm: eagle, draft: d, steps: 9, draft_tokens: 8", r"draft_tokens.*from 10 to"),
    ],
)
def test_what_a_catalog_may_not_say(tmp_path: Path, speculative: str, found: str) -> None:
    with pytest.raises(CatalogError, match=found):
        load_catalog(catalog(tmp_path, speculative))


def test_a_draft_is_part_of_the_models_sizes(tmp_path: Path) -> None:
    write(tmp_path / "target", TARGET, w=(100,))
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    write(tmp_path / "draft", DRAFT, fc=(50,))
    found = load_catalog(catalog(tmp_path, "algorithm: eagle, draft: draft"))
    spec = found.spec("m")
    assert spec.weight_bytes == 600
    assert spec.shape.kv_bytes_per_token == (4 + 1) * 2 * 2 * 4 * 4
    assert spec.speculation is not None and spec.speculation.draft == str(tmp_path / "draft")
    assert examine_model(found, "m", Hub(), [DeviceKind.HOST]).problems == ()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**DRAFT, "vocab_size": 11}))
    assert "knows 11 tokens" in examine_model(found, "m", Hub(), [DeviceKind.HOST]).problems[0]


def test_a_draft_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "target", TARGET, w=(100,))
    found = load_catalog(catalog(tmp_path, "algorithm: eagle, draft: nowhere"))
    assert "nowhere" in examine_model(found, "m", Hub(), [DeviceKind.HOST]).problems[0]
