"""Adapters in a catalog, and what is found out about them from their files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism.config.adapters import adapter_facts, adapter_mark, misfits, pool_bytes
from prism.config.catalog import Catalog, load_catalog
from prism.config.errors import CatalogError, ModelFilesError
from prism.config.health import examine_model
from prism.config.reload import diff
from prism.core.specs import LoraRoom, ModelShape
from tests.config.test_model_files import CONFIG, TENSORS, write_safetensors

DIMS = {
    "q_proj": (64, 64),
    "k_proj": (64, 16),
    "v_proj": (64, 16),
    "o_proj": (64, 64),
    "gate_proj": (64, 96),
    "up_proj": (64, 96),
    "down_proj": (96, 64),
}
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
CATALOG = """
defaults: {slo: {ttft: 1s, tpot: 50ms}, pin: true, engine_args: {dtype: float32}}
models:
  - {name: a, path: m, aliases: [alpha], slo: {ttft: 3s}, late: reject}
  - {name: x, base: alpha, adapter: x, aliases: [ex]}
  - {name: y, base: a, adapter: y, slo: {tpot: 10ms}, late: serve, max_wait: 5s}
"""


def write_adapter(
    folder: Path,
    modules: tuple[str, ...] = ("q_proj", "v_proj"),
    rank: int = 4,
    layers: tuple[int, ...] = (0, 1, 2),
    tensors: dict[str, tuple[str, list[int]]] | None = None,
    dims: dict[str, tuple[int, int]] = DIMS,
    **config: Any,
) -> Path:
    folder.mkdir(exist_ok=True)
    found: dict[str, tuple[str, list[int]]] = {}
    for layer in layers:
        for name in modules:
            block = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            stem = f"base_model.model.model.layers.{layer}.{block}.{name}"
            found[f"{stem}.lora_A.weight"] = ("F32", [rank, dims[name][0]])
            found[f"{stem}.lora_B.weight"] = ("F32", [dims[name][1], rank])
    write_safetensors(folder / "adapter_model.safetensors", found | (tensors or {}))
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT, "r": rank, **config}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model ``m`` and two adapters, ``x`` and ``y``."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    write_safetensors(tmp_path / "m" / "model.safetensors", TENSORS)
    write_adapter(tmp_path / "x")
    write_adapter(tmp_path / "y", ("down_proj",), rank=8)
    return tmp_path


def catalog(folder: Path, text: str = CATALOG) -> Catalog:
    (folder / "c.yaml").write_text(text)
    return load_catalog(folder / "c.yaml")


def test_an_adapter_inherits_objectives_from_its_base(folder: Path) -> None:
    found = catalog(folder)
    assert [model.name for model in found.models] == ["a"]
    x, y = found.adapters
    assert (x.base, x.slo.ttft_s, x.slo.tpot_s, x.late.value, x.max_wait_s) == ("a", 3.0, 0.05, "reject", 60.0)
    assert (y.slo.ttft_s, y.slo.tpot_s, y.late.value, y.max_wait_s) == (3.0, 0.01, "serve", 5.0)
    assert (found.resolve("ex"), found.served_by("ex"), found.served_by("alpha")) == ("x", "a", "a")
    assert found.near("exe")[0] == "ex"
    assert found.describe("ex")["base"] == "a" and "path" not in found.describe("x")


def test_an_adapter_can_be_written_out_again(folder: Path) -> None:
    found = catalog(folder)
    again = json.dumps({"models": [found.describe("a"), found.describe("x"), found.describe("y")]})
    assert catalog(folder, again).adapters == found.adapters


def test_its_base_keeps_room_for_its_adapters(folder: Path) -> None:
    found = catalog(folder)
    spec, plain = found.spec("a"), catalog(folder, "models: [{name: a, path: m}]").spec("a")
    assert spec.lora == LoraRoom(slots=8, max_rank=8, modules=("down_proj", "qkv_proj"))
    assert plain.lora is None
    qkv, down = 3 * 64 + (64 + 2 * 16), 96 + 64
    assert spec.weight_bytes - plain.weight_bytes == 9 * 3 * 8 * (qkv + down) * 4
    wide = catalog(folder, "models: [{name: a, path: m, lora: {slots: 1, max_rank: 2, target_modules: [o_proj]}}]")
    assert wide.spec("a").lora == LoraRoom(slots=1, max_rank=2, modules=("o_proj",))


@pytest.mark.parametrize("kind", ["embed", "classify"])
def test_models_that_embed_or_classify_keep_room_too(folder: Path, kind: str) -> None:
    text = CATALOG.replace("path: m,", f"path: m, kind: {kind},")
    assert catalog(folder, text).spec("a").lora == catalog(folder).spec("a").lora
    assert examine_model(catalog(folder, text), "x").problems == ()


def test_encoders_keep_no_room(folder: Path) -> None:
    (folder / "m" / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["BertModel"]}))
    found = catalog(folder)
    assert found.spec("a").lora is None
    assert "its base keeps no room for adapters" in examine_model(found, "x").problems[0]


def test_a_broken_adapter_is_its_own_problem(folder: Path) -> None:
    (folder / "y" / "adapter_config.json").unlink()
    found = catalog(folder)
    assert found.spec("a").lora == LoraRoom(slots=8, max_rank=4, modules=("qkv_proj",))
    assert examine_model(found, "a").problems == () and examine_model(found, "x").problems == ()
    assert "has no adapter_config.json" in examine_model(found, "y").problems[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name: z, base: b, adapter: x}", ["models[1].base", "is no model"]),
        ("{name: z, base: z, adapter: x}", ["models[1].base", "is no model"]),
        ("{name: z, base: a}", ["models[1].adapter", "required"]),
        ("{name: z, path: p, adapter: x}", ["models[1].base", "required"]),
        ("{name: z, base: a, adapter: x, path: p}", ["models[1].path", "no option of an adapter"]),
        ("{name: z, base: a, adapter: x, tp: 2}", ["models[1].tp", "no option of an adapter", "slo"]),
        ("{name: z, base: a, adapter: x, slo: {ttft: 0s}}", ["models[1].slo.ttft", "more than 0"]),
        ("{name: a, base: a, adapter: x}", ["already a name"]),
        ("{name: z, adapter: x}", ["models[1].path", "models[1].base"]),
        ("{name: z, path: p, lora: {slots: 0}}", ["models[1].lora.slots", "at least 1"]),
        ("{name: z, path: p, lora: {target_modules: [c_attn]}}", ["target_modules", "c_attn", "q_proj"]),
        ("{name: z, path: p, engine_args: {enable_lora: true}}", ["engine_args.enable_lora", "`base`"]),
    ],
)
def test_what_a_catalog_cannot_mean(folder: Path, text: str, said: list[str]) -> None:
    with pytest.raises(CatalogError) as caught:
        catalog(folder, f"models:\n  - {{name: a, path: m}}\n  - {text}\n")
    for word in said:
        assert word in str(caught.value)


def test_an_adapter_over_an_adapter(folder: Path) -> None:
    with pytest.raises(CatalogError, match="is an adapter itself; its base is alpha"):
        catalog(folder, CATALOG + "  - {name: z, base: x, adapter: y}\n")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "not a rank"),
        ({"r": 5}, "not of rank 5"),
        ({"lora_alpha": "much"}, "not a number"),
        ({"tensors": {"base_model.model.lm_head.lora_A.weight": ("F32", [4, 64])}}, "lm_head"),
        ({"tensors": {"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": ("F32", [4, 64])}}, "exp"),
        ({"modules": ()}, "changes nothing"),
    ],
)
def test_adapters_that_no_engine_serves(tmp_path: Path, made: dict[str, Any], said: str) -> None:
    write_adapter(tmp_path / "z", **made)
    with pytest.raises(ModelFilesError, match=said):
        adapter_facts("z", tmp_path)


def test_scaling_and_mark(tmp_path: Path) -> None:
    write_adapter(tmp_path / "z")
    first = adapter_mark(tmp_path / "z")
    assert adapter_facts("z", tmp_path).scaling == 2.0
    write_adapter(tmp_path / "z", use_rslora=True)
    assert adapter_facts("z", tmp_path).scaling == 4.0, "alpha over the root of the rank"
    assert adapter_mark(tmp_path / "z") != first


SHAPE = ModelShape(layers=3, hidden=64, heads=8, kv_heads=2, head_dim=8, intermediate=96, vocab=100, dtype_bytes=2)
ROOM = LoraRoom(slots=1, max_rank=4, modules=("qkv_proj",))


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    facts = adapter_facts(str(write_adapter(tmp_path / "z", layers=(0, 3))), tmp_path)
    assert list(misfits(facts, ROOM, SHAPE)) == ["changes decoder layer 3, its base has 3"]
    other = ModelShape(layers=4, hidden=64, heads=8, kv_heads=4, head_dim=8, intermediate=96, vocab=100)
    assert list(misfits(facts, ROOM, other)) == ["v_proj has 64 inputs and 16 outputs, that of its base 64 and 32"]


def test_an_adapter_too_large_for_the_room(tmp_path: Path) -> None:
    facts = adapter_facts(str(write_adapter(tmp_path / "z", ("q_proj", "o_proj"), rank=8)), tmp_path)
    assert list(misfits(facts, ROOM, SHAPE)) == [
        "has rank 8, its base takes 4 at most (lora.max_rank)",
        "changes o_proj, its base takes qkv_proj (lora.target_modules)",
    ]
    assert list(misfits(facts, None, SHAPE)) == ["its base keeps no room for adapters"]


def test_room_over_two_ranks() -> None:
    whole = pool_bytes(LoraRoom(1, 4, ("qkv_proj",)), SHAPE, 1)
    assert whole == 2 * 3 * 4 * (3 * 64 + 96) * 2
    assert pool_bytes(LoraRoom(1, 4, ("qkv_proj",)), SHAPE, 2) == 2 * 3 * 4 * (2 * 3 * 64 + 96) * 2


def test_a_reload_adds_and_removes_adapters(folder: Path) -> None:
    old = catalog(folder)
    new = catalog(
        folder, CATALOG.replace("{name: x, base: alpha", "{name: z, base: alpha").replace("tpot: 10ms", "tpot: 1s")
    )
    found = diff(old, new)
    assert [e.name for e in found.added] == ["z"] and [e.name for e in found.removed] == ["x"]
    (change,) = found.changed
    assert (change.new.name, change.keys, change.reactivate) == ("y", ("slo",), False)
    assert found.bases == {"a"} and found.needs_restart == ()
    assert diff(old, catalog(folder)).empty


def test_a_model_that_becomes_an_adapter(folder: Path) -> None:
    old = catalog(folder, "models: [{name: a, path: m}, {name: x, path: m}]")
    found = diff(old, catalog(folder, "models: [{name: a, path: m}, {name: x, base: a, adapter: x}]"))
    assert [type(e).__name__ for e in (*found.added, *found.removed)] == ["AdapterConfig", "ModelConfig"]


def test_keys_are_for_adapters_by_name(folder: Path) -> None:
    found = catalog(folder, CATALOG + "keys: [{name: k, key: secret-key, models: [ex]}]\n")
    (key,) = found.keys
    assert found.may_use(key, "x") and not found.may_use(key, "a") and not found.may_use(key, "y")
