"""Packing model folders: every byte of every tensor, tied heads once, broken folders refused with a name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from prism.weights.errors import BadModelFolder
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.folders.pack_folder import pack_folder
from prism.weights.folders.safetensors_folder import read_file, read_folder
from prism.weights.packs.format import PackKey
from prism.weights.store.weight_store import WeightStore


def model(folder: Path, shards: int = 1, seed: int = 0, tied: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {"model.embed_tokens.weight": rng.random((50, 16)).astype("float32")}
    for i in range(3):
        tensors[f"model.layers.{i}.mlp.weight"] = rng.random((16, 33)).astype("float16")
        tensors[f"model.layers.{i}.qweight"] = rng.integers(-9, 9, (7, 5)).astype("int32")
    tensors["model.norm.weight"] = rng.random(16).astype("float32")
    tensors["model.empty"] = np.zeros((0, 4), dtype="float32")
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = list(tensors)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        index.update(dict.fromkeys(part, file))
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_in_the_pack(store: WeightStore, tmp_path: Path, shards: int) -> None:
    tensors = model(tmp_path / "m", shards)
    header = pack_folder(store, tmp_path / "m")
    assert [b.name for b in header.blocks] == ["embeddings", "layer0", "layer1", "layer2", "head"]
    packed = store.get(header.key)
    assert packed is not None
    with packed:
        for name, array in tensors.items():
            entry, data = packed.tensor(name)
            assert (bytes(data), entry.shape) == (array.tobytes(), array.shape)
    assert store.verify(header.key) == []


def test_a_tied_head_is_stored_once(store: WeightStore, tmp_path: Path) -> None:
    model(tmp_path / "tied", tied=True)
    model(tmp_path / "untied")
    tied, untied = pack_folder(store, tmp_path / "tied"), pack_folder(store, tmp_path / "untied")
    assert tied.data_bytes == untied.data_bytes
    assert [t.aliases for t in tied.tensors if "embed" in t.name] == [("lm_head.weight",)]


def test_packing_twice_does_nothing(store: WeightStore, tmp_path: Path) -> None:
    model(tmp_path / "m")
    progress: list[int] = []
    first = pack_folder(store, tmp_path / "m", on_progress=lambda done, total: progress.append(done))
    assert progress
    assert pack_folder(store, tmp_path / "m", on_progress=lambda done, total: progress.clear()) == first
    assert progress


def test_the_fingerprint_names_contents_not_places(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        model(tmp_path / name, seed=seed)
    a, b, c = (fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c
    (tmp_path / "b" / "config.json").write_text('{"rope_theta": 5}')
    assert fingerprint(tmp_path / "b") != a


def test_the_remembered_fingerprint_follows_changes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    model(tmp_path / "m", seed=1)
    first = fingerprint(tmp_path / "m", cache)
    assert fingerprint(tmp_path / "m", cache) == first
    model(tmp_path / "m", seed=2)
    assert fingerprint(tmp_path / "m", cache) != first
    for file in (cache / ".fingerprints").iterdir():
        file.write_text("not json")
    assert fingerprint(tmp_path / "m", cache) == fingerprint(tmp_path / "m")


def write_header(file: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe",
        b"[1]",
        {"a": 5},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
    ],
)
def test_broken_safetensors_are_refused(tmp_path: Path, header: object) -> None:
    write_header(tmp_path / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(BadModelFolder, match=r"model\.safetensors"):
        read_folder(tmp_path)


def test_folders_that_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(BadModelFolder, match=r"no \*\.safetensors"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(BadModelFolder, match=r"gone\.safetensors"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(BadModelFolder, match="passwd"):
        read_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadModelFolder, match="no index"):
        read_folder(tmp_path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_fuzzed_safetensors_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.arange(6, dtype="float32"), "b": np.ones((2, 2), dtype="int8")}, file)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    try:
        tensors = read_file(file)
    except BadModelFolder:
        return
    assert all(t.offset + t.nbytes <= file.stat().st_size for t in tensors)


def test_a_missing_file_leaves_the_store_as_it_was(store: WeightStore, tmp_path: Path) -> None:
    with pytest.raises(BadModelFolder):
        pack_folder(store, tmp_path)
    assert store.ls() == []
    assert store.get(PackKey("anything")) is None
