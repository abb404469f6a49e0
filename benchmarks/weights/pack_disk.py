"""Question: does packing a model folder run at the rate of the disk it is read from, and how much of it is what?

Command: python -m benchmarks.weights.pack_disk [--gb 2] [--reps 3] [--folder DIR]

A safetensors folder is written, dropped from the page cache, read once plainly with direct I/O (the floor), dropped
again and packed: by default into an index of checksums (the goal is 80% of the plain read), and with ``--copy`` onto
the same disk. The floor of the latter is reading and writing at once without packing, which is what the disk gives when
it has to do both. Every side runs ``--reps`` times in turn and the best counts: the rate of a shared disk varies.

Last result (2 cores, 24 GB, no GPU): see docs/results/weights.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from prism.weights.folders.pack_folder import pack_folder
from prism.weights.packs.direct_buffers import direct_buffer
from prism.weights.packs.disk_pack import open_direct
from prism.weights.store.weight_store import WeightStore

CHUNK_BYTES = 8 << 20
READERS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (the disk to measure)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prism-pack-", dir=options.folder))
    try:
        measure(folder, int(options.gb * 1e9), options.reps)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(Path("/dev/shm") / folder.name, ignore_errors=True)


def measure(folder: Path, nbytes: int, reps: int) -> None:
    model = folder / "model"
    files = make_model(model, nbytes)
    total = sum(file.stat().st_size for file in files)
    sides: dict[str, Callable[[], object]] = {
        "read the files, direct I/O": lambda: read_all(files, None),
        "pack": lambda: pack(folder, model, copy=False),
        "read and write at once, no packing": lambda: read_all(files, folder / "copy"),
        "pack --copy (same disk, synced)": lambda: pack(folder, model, copy=True),
        "fill host memory from the index": lambda: fill(folder, model),
    }
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(reps):
        for name, side in sides.items():
            prepare(folder, files, model, name)
            best[name] = min(best[name], timed(side))
    read_s, both_s = best["read the files, direct I/O"], best["read and write at once, no packing"]
    for name, seconds in best.items():
        note = f"; {both_s / seconds:.0%} of reading and writing" if "--copy" in name else ""
        print(f"{total / seconds / 1e9:6.2f} GB/s {seconds:7.2f} s  {name} ({read_s / seconds:.0%} of the read{note})")


def prepare(folder: Path, files: list[Path], model: Path, name: str) -> None:
    """Nothing of an earlier run is left on the disk or in memory."""
    for left in (folder / "store", store_in(folder).host_directory):
        shutil.rmtree(left)
    (folder / "copy").unlink(missing_ok=True)
    if name.startswith("fill"):
        pack(folder, model, copy=False)
    os.sync()
    cold(files)


def store_in(folder: Path) -> WeightStore:
    return WeightStore(folder / "store", host_directory=Path("/dev/shm") / folder.name)


def pack(folder: Path, model: Path, copy: bool) -> None:
    pack_folder(store_in(folder), model, copy=copy)


def fill(folder: Path, model: Path) -> None:
    store = store_in(folder)
    packed = store.get(pack_folder(store, model).key)
    assert packed is not None
    with packed:
        for leaf in range(packed.header.leaves):
            packed.wait_leaf(leaf)


def make_model(folder: Path, nbytes: int) -> list[Path]:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    layers, shards = 24, 2
    each = nbytes // layers // 4
    files = []
    for shard in range(shards):
        rng = np.random.default_rng(shard)
        tensors = {
            f"model.layers.{i}.t{j}.weight": rng.integers(0, 256, each, dtype=np.uint8)
            for i in range(shard, layers, shards)
            for j in range(4)
        }
        save_file(tensors, folder / f"model-{shard}.safetensors")
        files.append(folder / f"model-{shard}.safetensors")
    os.sync()
    return files


def cold(files: list[Path]) -> None:
    """Drops the files from the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(files: list[Path], copy_to: Path | None) -> None:
    views = [direct_buffer(CHUNK_BYTES) for _ in range(READERS)]
    chunks = [(file, at) for file in files for at in range(0, file.stat().st_size, CHUNK_BYTES)]
    fds = {file: open_direct(file) for file in files}
    target = os.open(copy_to, os.O_WRONLY | os.O_CREAT | os.O_DIRECT) if copy_to else -1
    if target >= 0:
        os.posix_fallocate(target, 0, len(chunks) * CHUNK_BYTES)

    def work(index: int) -> None:
        for number in range(index, len(chunks), READERS):
            file, at = chunks[number]
            os.preadv(fds[file], [views[index]], at)
            if target >= 0:
                os.pwrite(target, views[index], number * CHUNK_BYTES)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(work, range(READERS)))
    if target >= 0:
        os.fsync(target)
        os.close(target)
    for fd in fds.values():
        os.close(fd)


def timed(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
