"""A configuration that its weights deny is refused with the field, its value, and what the weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from prism.cli.main import main
from prism.config.catalog import load_catalog
from prism.config.errors import ModelFilesError
from prism.config.health import examine_model
from prism.config.model_files import model_facts
from tests.config.test_model_files import CONFIG, write_safetensors

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 8, 2, 16
SPLIT = {
    "q_proj": [HEADS * HEAD_DIM, HIDDEN],
    "k_proj": [KV_HEADS * HEAD_DIM, HIDDEN],
    "v_proj": [KV_HEADS * HEAD_DIM, HIDDEN],
    "o_proj": [HIDDEN, HEADS * HEAD_DIM],
}
FUSED = {"qkv_proj": [(HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN], "o_proj": SPLIT["o_proj"]}
LATENT = {"kv_a_proj_with_mqa": [24, HIDDEN], "o_proj": SPLIT["o_proj"]}
RIGHT = {**CONFIG, "head_dim": HEAD_DIM}
LATENT_CONFIG = {**CONFIG, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


def model(
    folder: Path,
    config: dict[str, Any],
    parts: dict[str, list[int]],
    *,
    stored: str = "F32",
    prefix: str = "model.",
    layers: int = 3,
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {
        f"{prefix}layers.{i}.self_attn.{name}.weight": (stored, shape)
        for i in range(layers)
        for name, shape in parts.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("parts", [SPLIT, FUSED], ids=["split", "fused"])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_a_configuration_that_its_weights_confirm(tmp_path: Path, parts: dict[str, list[int]], prefix: str) -> None:
    assert model_facts(str(model(tmp_path / "m", RIGHT, parts, prefix=prefix)), tmp_path).shape.kv_heads == KV_HEADS


@pytest.mark.parametrize(
    ("changes", "parts", "said"),
    [
        ({"num_key_value_heads": 4}, SPLIT, "`num_key_value_heads` is 4 and `head_dim` 16.*k_proj.* 32 rows.* 2 heads"),
        ({"num_key_value_heads": 1}, SPLIT, "`num_key_value_heads` is 1.* 2 heads"),
        ({"num_key_value_heads": 4}, FUSED, "`num_key_value_heads` is 4.*qkv_proj.* 192 rows.* 2 heads"),
        ({"num_key_value_heads": 4, "head_dim": None}, SPLIT, "`num_key_value_heads` is 4.* 2 heads"),
        ({"head_dim": 32}, SPLIT, "`num_attention_heads` is 8 and `head_dim` 32, 256 together.*o_proj.* takes 128"),
        ({"num_attention_heads": 4}, SPLIT, "`num_attention_heads` is 4 and `head_dim` 16, 64 together.*takes 128"),
        ({"hidden_size": 128}, SPLIT, "`hidden_size` is 128, and self_attn.q_proj.weight takes 64"),
        ({"num_hidden_layers": 5}, SPLIT, "`num_hidden_layers` is 5, and the weights have 3 layers"),
    ],
)
def test_what_the_weights_deny(tmp_path: Path, changes: dict[str, Any], parts: dict[str, list[int]], said: str) -> None:
    folder = model(tmp_path / "m", {**RIGHT, **changes}, parts)
    with pytest.raises(ModelFilesError, match=said) as caught:
        model_facts(str(folder), tmp_path)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, None), ({"kv_lora_rank": 32}, "`kv_lora_rank` and `qk_rope_head_dim` are 40 together.* 24 rows")],
)
def test_the_latent_row(tmp_path: Path, changes: dict[str, Any], said: str | None) -> None:
    folder = str(model(tmp_path / "m", {**LATENT_CONFIG, **changes}, LATENT))
    if said is None:
        assert model_facts(folder, tmp_path).shape.latent == 24
        return
    with pytest.raises(ModelFilesError, match=said):
        model_facts(folder, tmp_path)


@pytest.mark.parametrize(
    ("changes", "stored", "prefix"),
    [
        ({"num_key_value_heads": 4}, "U8", "model."),
        ({"num_key_value_heads": 4}, "F32", "vision_tower.encoder."),
        ({"num_key_value_heads": 4, "swa_num_key_value_heads": 2}, "F32", "model."),
        ({"num_key_value_heads": 4, "block_configs": [{"attention": {}}]}, "F32", "model."),
        ({"num_hidden_layers": 2}, "F32", "model."),
        ({"head_dim": None}, "F32", "model."),
        ({"num_key_value_heads": None}, "F32", "model."),
    ],
    ids=["packed", "a tower", "other heads in windows", "heads by layer", "a layer more", "no head_dim", "no kv heads"],
)
def test_what_is_not_judged(tmp_path: Path, changes: dict[str, Any], stored: str, prefix: str) -> None:
    folder = model(tmp_path / "m", {**RIGHT, **changes}, SPLIT, stored=stored, prefix=prefix)
    assert model_facts(str(folder), tmp_path)


def test_it_is_said_before_anything_is_loaded_or_packed(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", {**RIGHT, "num_key_value_heads": 4}, SPLIT)
    (tmp_path / "c.yaml").write_text("models: [{name: a, path: m}]")
    (problem,) = examine_model(load_catalog(tmp_path / "c.yaml"), "a").problems
    assert "`num_key_value_heads` is 4" in problem
    packed = CliRunner().invoke(main, ["pack", str(folder), "--state-dir", str(tmp_path / "state")])
    assert packed.exit_code != 0 and "`num_key_value_heads` is 4" in packed.output
    assert not list((tmp_path / "state").rglob("*.pack"))
