"""Packs that leave their bytes in the model's files: the same data area as a copy, and refused once a file changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.transfer.errors import SourceLost
from prism.weights.errors import BadPack, CorruptBlock, StalePack
from prism.weights.folders.pack_folder import pack_folder
from prism.weights.packs.disk_pack import header_of, open_pack, read_index
from prism.weights.packs.format import PackHeader
from prism.weights.packs.index import PackIndex, decode_index, encode_index
from prism.weights.packs.pack_files import pack_name
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier
from tests.weights.test_packer import model


def data_of(store: WeightStore, header: PackHeader) -> bytes:
    packed = store.get(header.key)
    assert packed is not None
    with packed:
        for leaf in range(packed.header.leaves):
            packed.wait_leaf(leaf)
        return bytes(packed.data)


def path_of(store: WeightStore, header: PackHeader) -> Path:
    return store.directory / pack_name(header.key)


@pytest.mark.parametrize("shards", [1, 3])
def test_an_index_and_a_copy_give_the_same_bytes(tmp_path: Path, shards: int) -> None:
    model(tmp_path / "m", shards)
    stores = [WeightStore(tmp_path / f"{n}-disk", host_directory=tmp_path / f"{n}-host") for n in "ab"]
    index, copy = (pack_folder(s, tmp_path / "m", copy=c) for s, c in zip(stores, (False, True), strict=True))
    assert index == copy
    assert data_of(stores[0], index) == data_of(stores[1], copy)
    assert stores[0].refers_to(index.key) == tmp_path / "m"
    assert stores[1].refers_to(copy.key) is None
    assert path_of(stores[0], index).stat().st_size < path_of(stores[1], copy).stat().st_size


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_range_of_either_kind_is_the_same(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "m").exists():
        model(tmp_path / "m", 3)
        for copy in (False, True):
            pack_folder(WeightStore(tmp_path / str(copy), host_directory=tmp_path / "host"), tmp_path / "m", copy=copy)
    paths = [next((tmp_path / str(copy)).glob("*/*.pack")) for copy in (False, True)]
    with open_pack(paths[0]) as index, open_pack(paths[1]) as contiguous:
        first = data.draw(st.integers(0, index.header.data_bytes - 1))
        end = data.draw(st.integers(first, index.header.data_bytes))
        found, expected = bytearray(end - first), bytearray(end - first)
        index.read(first, memoryview(found))
        contiguous.read(first, memoryview(expected))
        assert found == expected


def test_a_copy_replaces_an_index_and_outlives_the_folder(store: WeightStore, tmp_path: Path) -> None:
    tensors = model(tmp_path / "m")
    pack_folder(store, tmp_path / "m")
    header = pack_folder(store, tmp_path / "m", copy=True)
    assert store.refers_to(header.key) is None
    shutil.rmtree(tmp_path / "m")
    packed = store.get(header.key)
    assert packed is not None
    with packed:
        assert bytes(packed.tensor("model.norm.weight")[1]) == tensors["model.norm.weight"].tobytes()


def test_another_block_size_packs_again(store: WeightStore, tmp_path: Path) -> None:
    model(tmp_path / "m")
    whole, cut = pack_folder(store, tmp_path / "m"), pack_folder(store, tmp_path / "m", block_bytes=1024)
    assert len(cut.blocks) > len(whole.blocks)
    assert pack_folder(store, tmp_path / "m") == cut  # no wish: what is there is good


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


@pytest.mark.parametrize("change", [touch, Path.unlink, lambda file: file.write_bytes(file.read_bytes() + b"more")])
def test_a_changed_file_is_refused_and_named(store: WeightStore, tmp_path: Path, change: object) -> None:
    model(tmp_path / "m")
    header = pack_folder(store, tmp_path / "m")
    assert callable(change)
    change(tmp_path / "m" / "model-0.safetensors")
    for use in (store.get, store.verify):
        with pytest.raises(StalePack, match=rf"model-0\.safetensors.*prism pack {tmp_path / 'm'}"):
            use(header.key)
    assert store.usable(header.key) is None
    assert store.header(header.key) == header


def test_packing_again_renews_a_stale_index(store: WeightStore, tmp_path: Path) -> None:
    model(tmp_path / "m")
    header = pack_folder(store, tmp_path / "m")
    touch(tmp_path / "m" / "model-0.safetensors")
    assert pack_folder(store, tmp_path / "m") == header
    assert store.verify(header.key) == []


def test_the_same_model_elsewhere_renews_the_index(store: WeightStore, tmp_path: Path) -> None:
    model(tmp_path / "m")
    header = pack_folder(store, tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "moved")
    assert pack_folder(store, tmp_path / "moved").key == header.key
    assert store.refers_to(header.key) == tmp_path / "moved"


def test_a_copy_in_memory_needs_the_files_no_more(store: WeightStore, tmp_path: Path) -> None:
    model(tmp_path / "m")
    header = pack_folder(store, tmp_path / "m")
    before = data_of(store, header)
    shutil.rmtree(tmp_path / "m")
    assert data_of(store, header) == before
    store.rm(header.key, (Tier.HOST,))
    with pytest.raises(StalePack):
        store.get(header.key)


def test_bytes_changed_behind_its_back_are_found_by_their_checksum(store: WeightStore, tmp_path: Path) -> None:
    """Same size, same time, other bytes: only the checksums can tell, and the block is named."""
    model(tmp_path / "m")
    header = pack_folder(store, tmp_path / "m")
    file = tmp_path / "m" / "model-0.safetensors"
    stat, raw = file.stat(), bytearray(file.read_bytes())
    raw[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    corrupt = store.verify(header.key)
    assert len(corrupt) == 1
    with pytest.raises((CorruptBlock, SourceLost), match=corrupt[0].block.split(",")[0]):
        data_of(store, header)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_indexes_are_refused(store: WeightStore, tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "m").exists():
        model(tmp_path / "m", 2)
        pack_folder(store, tmp_path / "m")
    raw = bytearray(next(store.directory.glob("*/*.pack")).read_bytes())
    used = len(raw.rstrip(b"\0"))
    cut = data.draw(st.integers(0, used))
    raw[data.draw(st.integers(0, used - 1))] ^= data.draw(st.integers(1, 255))
    broken = tmp_path / "broken.pack"
    broken.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    with pytest.raises(BadPack):
        header_of(broken)


def test_indexes_that_point_outside_are_refused(store: WeightStore, tmp_path: Path) -> None:
    model(tmp_path / "m")
    good = read_index(path_of(store, pack_folder(store, tmp_path / "m")))
    assert good is not None
    files = good.files
    changes: list[tuple[dict[str, object], str]] = [
        ({"places": good.places[1:]}, "places for"),
        ({"places": ((1, 0), *good.places[1:])}, "in file 1 of 1"),
        ({"places": ((0, -8), *good.places[1:])}, "not inside its file"),
        ({"places": ((0, files[0].nbytes), *good.places[1:])}, "not inside its file"),
        ({"files": (msgspec.structs.replace(files[0], name="../../etc/passwd"),)}, "no name of a file"),
    ]
    for change, why in changes:
        raw = encode_index(msgspec.structs.replace(good, **change))
        broken = tmp_path / "broken.pack"
        broken.write_bytes(raw)
        with pytest.raises(BadPack, match=why):
            read_index(broken)
    body = msgspec.msgpack.encode({"header": 1})
    with pytest.raises(BadPack, match="checksum"):
        decode_index(body, 0, "a test")
    assert isinstance(good, PackIndex)


def test_the_index_hardly_uses_the_budget(tmp_path: Path) -> None:
    model(tmp_path / "m")
    store = WeightStore(tmp_path / "disk", 8192, host_directory=tmp_path / "host")
    header = pack_folder(store, tmp_path / "m")
    assert [info.nbytes for info in store.ls()] == [4096]
    assert header.data_bytes > 8192
