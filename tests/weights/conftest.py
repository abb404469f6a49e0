"""Stores in temporary folders (the shared copies too: nothing is left in shared memory) and seeded packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackKey
from prism.weights.store.weight_store import WeightStore

Contents = dict[str, bytes]
KEY = PackKey("0123abcd", "raw")


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "disk", host_directory=tmp_path / "host")


def contents_of(layers: int = 4, nbytes: int = 300_000, seed: int = 1) -> Contents:
    rng = np.random.default_rng(seed)
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.mlp.weight" for i in range(layers)), "model.norm.weight"]
    return {name: rng.bytes(nbytes if "norm" not in name else 1000) for name in names}


def write_pack(store: WeightStore, contents: Contents, key: PackKey = KEY) -> None:
    plans = [TensorPlan(name, "uint8", (len(data),)) for name, data in contents.items()]
    with store.writer(key, plan_blocks(plans), label="a test") as writer:
        for name, data in contents.items():
            writer.write(name, data)
        writer.finish()


@pytest.fixture
def packed_store(store: WeightStore) -> Iterator[tuple[WeightStore, Contents]]:
    """A store that has one pack on disk under :data:`KEY`."""
    contents = contents_of()
    write_pack(store, contents)
    yield store, contents


Damage = Callable[[bytearray], object]


def damage_file(path: Path, change: Damage) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
