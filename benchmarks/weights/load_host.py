"""Question: does loading a 2 GB model from the shared host copy into a virtual device reach this machine's memcpy rate?

Command: python -m benchmarks.weights.load_host [--gb 2]

Both sides copy the same bytes from the same mapping into the same weight region, in one process. The floor is the C
library's memcpy with as many threads as the loader uses, best of all runs; the goal is 85% of it with every byte's
checksum verified on the way. Beside it: the first load into a region whose pages must be made first, a load from disk
while it is read into memory, and one tensor at a time in a Python loop (what packing replaces).

Last result (2 cores, 24 GB, no GPU; see docs/results/weights.md).
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from prism import memory
from prism.weights.loading.loader import _WORKERS, load
from prism.weights.packs.blocks import TensorPlan, plan_blocks
from prism.weights.packs.format import PackKey
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier

LAYERS = 32
TENSORS_PER_LAYER = 9
STEP_BYTES = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prism-load-"))
    host = Path(tempfile.mkdtemp(prefix="prism-load-", dir="/dev/shm"))
    try:
        measure(WeightStore(folder / "store", host_directory=host), folder, int(options.gb * 1e9), options.reps)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(host)


def measure(store: WeightStore, folder: Path, nbytes: int, reps: int) -> None:
    key = make_pack(store, nbytes)
    device = memory.open_device("host:0", capacity_bytes=2 * nbytes, account_dir=folder / "accounts")
    owner = device.register("benchmark")
    store.rm(key, (Tier.HOST,))
    packed = opened(store, key)
    region = owner.weight_region(packed.header.data_bytes)

    def make_pages_and_load() -> None:
        region.commit()
        load(packed, region)

    report("load from disk into a new region", packed, timed(make_pages_and_load))
    region.decommit()
    report("load from host memory into a new region (pages made first)", packed, timed(make_pages_and_load))
    sides: dict[str, Callable[[], object]] = {
        f"memcpy, {_WORKERS} threads": lambda: memcpy(packed, region.address, _WORKERS),
        "memcpy, 1 thread": lambda: memcpy(packed, region.address, 1),
        f"load, {_WORKERS} threads, every byte verified": lambda: load(packed, region),
        "tensor by tensor in Python, not verified": lambda: by_tensor(packed, region.address),
    }
    best = {name: min(timed(side) for _ in range(reps)) for name, side in sides.items()}
    floor = min(best[name] for name in best if name.startswith("memcpy"))
    for name, seconds in best.items():
        report(f"{name} ({floor / seconds:.0%} of memcpy)", packed, seconds)
    assert ctypes.string_at(region.address, 4096) == bytes(packed.data[:4096])
    packed.close()
    region.close()
    owner.close()


def make_pack(store: WeightStore, nbytes: int) -> PackKey:
    key, each = PackKey("benchmark"), nbytes // LAYERS // TENSORS_PER_LAYER
    names = [f"layers.{i}.t{j}.weight" for i in range(LAYERS) for j in range(TENSORS_PER_LAYER)]
    data = np.random.default_rng(0).integers(0, 256, each, dtype=np.uint8).tobytes()
    with store.writer(key, plan_blocks([TensorPlan(name, "uint8", (each,)) for name in names])) as writer:
        for name in names:
            writer.write(name, data)
        writer.finish()
    return key


def opened(store: WeightStore, key: PackKey) -> ResidentPack:
    packed = store.get(key)
    assert packed is not None
    return packed


def memcpy(packed: ResidentPack, target: int, threads: int) -> None:
    def part(index: int) -> None:
        for at in range(index * STEP_BYTES, packed.header.data_bytes, threads * STEP_BYTES):
            ctypes.memmove(target + at, packed.address + at, min(STEP_BYTES, packed.header.data_bytes - at))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(threads)))


def by_tensor(packed: ResidentPack, target: int) -> None:
    for tensor in packed.header.tensors:
        at = packed.header.blocks[tensor.block].offset + tensor.offset
        ctypes.memmove(target + at, packed.address + at, tensor.nbytes)


def timed(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def report(name: str, packed: ResidentPack, seconds: float) -> None:
    print(f"{packed.header.data_bytes / seconds / 1e9:6.2f} GB/s {seconds * 1e3:7.0f} ms  {name}", flush=True)


if __name__ == "__main__":
    main()
