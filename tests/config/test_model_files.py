"""Sizes are read from headers, and files that cannot be used say why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from prism.config.catalog import Catalog, load_catalog
from prism.config.errors import ModelFilesError
from prism.config.model_files import facts_from, local_folder, model_facts, model_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
TENSORS = {"a": ("F32", [100, 64]), "b": ("F32", [3, 7])}


def write_safetensors(file: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        count = 4
        for dimension in shape:
            count *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", TENSORS)
    return folder


def catalog_of(folder: Path, more: str = "") -> Catalog:
    file = folder.parent / "c.yaml"
    file.write_text(f"models: [{{name: a, path: {folder.name}{more}}}]")
    return load_catalog(file)


@pytest.mark.parametrize(
    ("architecture", "count", "arguments"),
    [
        ("Gemma3ForConditionalGeneration", 2, {"enable_multimodal": True}),
        ("Gemma3ForConditionalGeneration", 0, {}),
        ("LlamaForCausalLM", 2, {}),
    ],
)
def test_where_images_are_on_models_take_them(
    model: Path, architecture: str, count: int, arguments: dict[str, Any]
) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": CONFIG}))
    file = model.parent / "c.yaml"
    asked = "models: [{name: a, path: m}, {name: b, path: m, engine_args: {enable_multimodal: false}}]"
    file.write_text(f"{asked}\nserver: {{images: {{max_count: {count}}}}}")
    catalog = load_catalog(file)
    assert dict(catalog.spec("a").engine_args) == arguments
    assert dict(catalog.spec("b").engine_args) == {"enable_multimodal": False}


def test_spec(model: Path) -> None:
    spec = catalog_of(model, ", tp: 2, engine_args: {dtype: float32}").spec("a")
    assert spec.weight_bytes == 4 * (6400 + 21)
    assert spec.path == str(model)
    assert (spec.shape.layers, spec.shape.kv_heads, spec.shape.head_dim, spec.shape.vocab) == (3, 2, 8, 100)
    assert spec.shape.kv_bytes_per_token == 2 * 3 * 2 * 8 * 4
    assert spec.context_tokens == 512
    assert spec.shard_weight_bytes == 2 * (6400 + 21)


def test_auto_dtype_is_the_stored_one(model: Path) -> None:
    assert catalog_of(model).spec("a").weight_bytes == 4 * (6400 + 21)
    assert catalog_of(model, ", engine_args: {dtype: half}").spec("a").weight_bytes == 2 * (6400 + 21)
    assert catalog_of(model, ", context_length: 99").spec("a").context_tokens == 99


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"n_positions": 777}, 777),
        ({"max_position_embeddings": 1000, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4000),
        ({"max_position_embeddings": 1000, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 2000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1000),
        ({"max_position_embeddings": 1000, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 1000),
        ({}, 0),
    ],
)
def test_context_is_read_as_the_engine_reads_it(config: dict[str, Any], tokens: int) -> None:
    """Expected values are those of SGLang's ``get_context_length`` for the same configurations."""
    dimensions = {name: value for name, value in CONFIG.items() if name != "max_position_embeddings"}
    assert facts_from({**dimensions, **config}, [], "auto", "here").context_tokens == tokens


def test_a_changed_config_is_read_again(model: Path) -> None:
    assert model_facts("m", model.parent).shape.layers == 3
    (model / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 5}))
    os.utime(model / "config.json", ns=(1, 1))
    assert model_facts("m", model.parent).shape.layers == 5


def test_replaced_weights_are_read_again(model: Path) -> None:
    assert model_facts("m", model.parent).weight_bytes == 4 * (6400 + 21)
    write_safetensors(model / "model.safetensors", {"a": ("F32", [5])})
    assert model_facts("m", model.parent).weight_bytes == 20


def test_sharded_files_follow_the_index(model: Path) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    write_safetensors(model / "unused.safetensors", TENSORS)
    index = {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert model_facts("m", model.parent, dtype="float32").weight_bytes == 4 * (6400 + 21)


def damage_truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def damage_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 64)


def damage_json(model: Path) -> None:
    (model / "config.json").write_text("{")


def damage_shape(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 3}))


def damage_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def damage_no_config(model: Path) -> None:
    (model / "config.json").unlink()


def damage_header_is_a_list(model: Path) -> None:
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")


def damage_dead_link(model: Path) -> None:
    (model / "extra.safetensors").symlink_to(model / "nowhere")


@pytest.mark.parametrize(
    "damage",
    [
        damage_dead_link,
        damage_truncate,
        damage_header,
        damage_json,
        damage_shape,
        damage_no_weights,
        damage_no_config,
        damage_header_is_a_list,
    ],
)
def test_damaged_files_are_named(model: Path, damage: Any) -> None:
    damage(model)
    with pytest.raises(ModelFilesError) as caught:
        catalog_of(model).spec("a")
    assert str(model) in str(caught.value)


def test_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="does not exist"):
        local_folder("./nowhere/at/all", tmp_path)
    assert local_folder("org/model", tmp_path) is None


def test_a_hub_model_that_was_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **options: object) -> str:
        assert options["local_files_only"]
        raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelFilesError, match="hf download org/model"):
        model_folder("org/model", tmp_path, download=False)


@pytest.mark.parametrize(
    ("config", "kv_bytes_per_token"),
    [
        ({**CONFIG, "head_dim": 32, "torch_dtype": "bfloat16"}, 2 * 3 * 2 * 32 * 2),
        ({**CONFIG, "num_key_value_heads": None, "torch_dtype": "bfloat16"}, 2 * 3 * 8 * 8 * 2),
        ({"text_config": CONFIG, "dtype": "bfloat16"}, 2 * 3 * 2 * 8 * 2),
        ({"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 9, "torch_dtype": "float16"}, 2 * 2 * 4 * 8 * 2),
        ({**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}, 3 * 576 * 2),
    ],
)
def test_shapes_of_other_families(config: dict[str, Any], kv_bytes_per_token: int) -> None:
    assert facts_from(config, [], "auto", "x").shape.kv_bytes_per_token == kv_bytes_per_token


def test_latent_attention_keeps_a_row_and_projects_down_and_up() -> None:
    """DeepSeek-V3's numbers: 576 elements per token and layer, 187 million parameters of attention per layer (technical
    report, section 4.2); ranks cannot divide the row."""
    v3 = {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        "dtype": "bfloat16",
    }
    shape = facts_from(v3, [], "auto", "x").shape
    assert shape.kv_bytes_per_token == shape.kv_bytes_per_rank(8) == 61 * 576 * 2
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert shape.attention_weights == by_hand == 187_105_280
    without_q_rank = facts_from({**v3, "q_lora_rank": None}, [], "auto", "x").shape
    assert without_q_rank.attention_weights == by_hand - 1536 * (7168 + 128 * 192) + 7168 * 128 * 192


def test_ranks_divide_heads_and_keep_at_least_one() -> None:
    shape = facts_from({**CONFIG, "head_dim": 32, "torch_dtype": "bfloat16"}, [], "auto", "x").shape
    assert [shape.kv_heads * shape.kv_bytes_per_rank(tp) // shape.kv_bytes_per_token for tp in (1, 2, 4)] == [2, 1, 1]


def test_quantised_tensors_keep_their_size() -> None:
    facts = facts_from(
        {**CONFIG, "dtype": "bfloat16"}, [("F8_E4M3", [10, 10]), ("BF16", [5]), ("I32", [2])], "auto", "x"
    )
    assert facts.weight_bytes == 100 + 10 + 8
