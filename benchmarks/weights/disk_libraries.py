"""Question: is a kept library quicker than our own threads at bringing a model from disk into host memory?

Command: python -m benchmarks.weights.disk_libraries [--gb 2] [--reps 2]

2 GB of safetensors, dropped from the page cache before every run: a plain direct read (the floor), filling the shared
host copy from an index (every byte verified, usable as it arrives), Run:ai's streamer and fastsafetensors into memory
of their own (nothing verified). Libraries that are not installed are left out; neither is a dependency of Prism
(``pip install --no-deps --target DIR runai-model-streamer humanize fastsafetensors`` and ``PYTHONPATH=DIR`` will do).

Last result (2 cores, 24 GB, no GPU): see docs/results/weights.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.weights.pack_disk import fill, make_model, prepare, read_all, timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--reps", type=int, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="prism-disk-"))
    try:
        measure(folder, make_model(folder / "model", int(options.gb * 1e9)), options.reps)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(Path("/dev/shm") / folder.name, ignore_errors=True)


def measure(folder: Path, files: Sequence[Path], reps: int) -> None:
    print(f"load before: {os.getloadavg()[0]:.1f}")
    total = sum(file.stat().st_size for file in files)
    sides: dict[str, Callable[[], object]] = {
        "plain direct read": lambda: read_all(list(files), None),
        "fill the shared host copy, verified": lambda: fill(folder, folder / "model"),
    }
    for module, side in (("runai_model_streamer", streamer), ("fastsafetensors", fastsafetensors)):
        if importlib.util.find_spec(module):
            sides[module] = lambda side=side: side(files)  # type: ignore[misc]
        else:
            print(f"{module} is not installed")
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(reps):
        for name, run in sides.items():
            prepare(folder, list(files), folder / "model", name)
            best[name] = min(best[name], timed(run))
    for name, seconds in best.items():
        print(f"{total / seconds / 1e9:6.2f} GB/s {seconds:7.2f} s  {name}", flush=True)


def streamer(files: Sequence[Path]) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as stream:
        stream.stream_files([str(file) for file in files])
        for _ in stream.get_tensors():
            pass


def fastsafetensors(files: Sequence[Path]) -> None:
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: [str(file) for file in files]})
    loader.copy_files_to_device().close()
    loader.close()


if __name__ == "__main__":
    main()
