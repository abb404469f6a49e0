"""Model folders made to do harm: nothing of them runs, and whatever is wrong with them ends that model only."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.config.catalog import load_catalog
from prism.config.errors import CatalogError, ModelFilesError
from prism.config.health import examine_model
from prism.config.model_files import facts_from, model_facts
from tests.config.test_model_files import CONFIG, TENSORS, write_safetensors

pytestmark = pytest.mark.hostile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


class Bomb:
    """What a pickle runs when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def facts(folder: Path) -> object:
    return model_facts(folder.name, folder.parent)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickled_weights_are_refused_and_not_loaded(folder: Path, name: str) -> None:
    mark = folder / "ran"
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(ModelFilesError, match="safetensors"):
        facts(folder)
    assert not mark.exists()


@pytest.mark.parametrize("value", ["pt", "npcache"])
def test_the_catalog_cannot_ask_for_pickled_weights(tmp_path: Path, value: str) -> None:
    (tmp_path / "c.yaml").write_text(f"models: [{{name: a, path: m, engine_args: {{load_format: {value}}}}}]")
    with pytest.raises(CatalogError, match="can run code"):
        load_catalog(tmp_path / "c.yaml")


def header(folder: Path, text: bytes, length: int | None = None) -> None:
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (b"{}", 99_999_999),
        (b"{}", 1 << 63),
        (b"[" * 100_000, None),
        (b'{"a":' * 100_000, None),
        (b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 0]}}', None),
        (b'{"a": {"dtype": "F32", "shape": [1e30], "data_offsets": [0, 0]}}', None),
        (b'{"a": {"dtype": "F32", "shape": [4611686018427387903], "data_offsets": [0, 0]}}', None),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}', None),
        (b'{"a": null}', None),
        (b"\xff\xfe{}", None),
    ],
)
def test_headers_that_lie(folder: Path, text: bytes, length: int | None) -> None:
    header(folder, text, length)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors"):
        facts(folder)


def test_a_giant_header_that_is_honest_is_read(folder: Path) -> None:
    """24 MB of it."""
    write_safetensors(folder / "model.safetensors", {f"layer.{i}.weight": ("F32", [0, 7]) for i in range(300_000)})
    assert facts(folder)


@pytest.mark.parametrize("outside", ["../other.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_that_leads_outside(folder: Path, outside: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": outside}}))
    with pytest.raises(ModelFilesError, match="outside of the folder"):
        facts(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_nesting_without_end(folder: Path, name: str) -> None:
    write_safetensors(folder / "model.safetensors", TENSORS)
    (folder / name).write_text("[" * 200_000)
    (folder.parent / "c.yaml").write_text("models: [{name: a, path: m}]")
    found = examine_model(load_catalog(folder.parent / "c.yaml"), "a")
    assert bool(found.problems) == (name == "config.json")


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.just(10**400),
)  # fmt: skip
KEYS = sorted({*CONFIG, "head_dim", "text_config", "kv_lora_rank", "rope_scaling"})


@given(st.dictionaries(st.sampled_from(KEYS), ODD))
@settings(max_examples=300, deadline=None)
def test_any_configuration_is_read_or_refused_with_words(changes: dict[str, Any]) -> None:
    try:
        found = facts_from({**CONFIG, **changes}, [("F32", [4, 4])], "auto", "config.json")
    except ModelFilesError as error:
        assert "config.json" in str(error)
    else:
        assert found.shape.kv_bytes_per_token > 0 and found.context_tokens >= 0 and found.weight_bytes > 0
