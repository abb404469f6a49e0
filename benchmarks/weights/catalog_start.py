"""Question: what does opening the store cost at the start of a server whose catalog has 500 packed models?

Command: python -m benchmarks.weights.catalog_start [--models 500]

Each model folder has a Llama-8B-shaped header (291 tensors) but hardly any bytes, each pack likewise. Timed, in a fresh
store object: naming every model by its folder (remembered fingerprints, checked against the files' times), listing the
store, and reading every header. The goal is 2 s for all of it. Beside it: the first naming, which reads the folders.

Last result (2 cores, 24 GB, no GPU): see docs/results/weights.md.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from prism.weights.folders.fingerprint import fingerprint
from prism.weights.folders.pack_folder import pack_folder
from prism.weights.packs.format import PackKey
from prism.weights.store.weight_store import WeightStore

LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_norm", "post_norm")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=500)
    count = parser.parse_args().models
    folder = Path(tempfile.mkdtemp(prefix="prism-catalog-"))
    try:
        models = [make_model(folder / f"m{i}", i) for i in range(count)]
        measure(folder, models)
    finally:
        shutil.rmtree(folder)


def make_model(folder: Path, seed: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    names = [f"model.layers.{i}.{part}.weight" for i in range(32) for part in LAYER]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    save_file({name: rng.random(16).astype("float32") for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def measure(folder: Path, models: list[Path]) -> None:
    first = WeightStore(folder / "store", host_directory=folder / "host")
    start_s = time.perf_counter()
    names = [fingerprint(model, first.directory) for model in models]
    print(f"{time.perf_counter() - start_s:7.3f} s  name {len(models)} models for the first time")
    start_s = time.perf_counter()
    for model in models:
        pack_folder(first, model)
    print(f"{time.perf_counter() - start_s:7.3f} s  pack them")
    start_s = time.perf_counter()
    store = WeightStore(folder / "store", host_directory=folder / "host")
    named_s = time.perf_counter()
    assert [fingerprint(model, store.directory) for model in models] == names
    listed_s = time.perf_counter()
    assert len(store.ls()) == len(models)
    headers_s = time.perf_counter()
    assert all(store.header(PackKey(name)) for name in names)
    end_s = time.perf_counter()
    print(f"{listed_s - named_s:7.3f} s  name them again")
    print(f"{headers_s - listed_s:7.3f} s  list the store")
    print(f"{end_s - headers_s:7.3f} s  read every header")
    print(f"{end_s - start_s:7.3f} s  start-up in all (goal: 2 s)")


if __name__ == "__main__":
    main()
