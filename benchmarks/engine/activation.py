"""How long does an inactive model take to become ready when its weights are in host memory and a worker is parked?

    python -m benchmarks.engine.activation [--rounds 20] [--models DIR]

Rounds over the three demo models in one worker: activate, deactivate. The first activation of each model reads its
files and is shown apart. Two pools take turns: one whose worker keeps nothing of a model that leaves, one whose worker
keeps all three built. Beside them stands the floor: a plain memory copy of the same weights, in the same run. Goal:
p50 <= 250 ms where nothing is kept.

Last result: docs/results/engine.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.demo_models import given_models, pool_spec
from prism.core.ids import DeviceId, Generation, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import DeviceKind, DeviceSpec, ModelSpec
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool

ROOT = Path(__file__).resolve().parents[2]

DEVICE = DeviceId("local/host:0")
MODELS = ("demo-llama", "demo-qwen3", "demo-stablelm")


def copy_seconds(nbytes: int) -> float:
    """Median of a plain copy of ``nbytes`` between two warm buffers."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    times = []
    for _ in range(9):
        start_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


@dataclass
class Side:
    """One pool's numbers, in seconds."""

    name: str
    pool: EnginePool
    models: Sequence[ModelSpec]
    cold: dict[str, float] = field(default_factory=dict)
    warm: dict[str, list[float]] = field(default_factory=dict)
    down: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)
    own_bytes: int = 0
    """Memory of the worker that no other process shares, after its last model has left."""

    async def turn(self, model: ModelSpec, turn: int) -> None:
        name = model.name
        key, (part,) = InstanceKey(name, Generation(turn)), whole_model([DEVICE])
        start_s = time.perf_counter()
        handle = await self.pool.activate(key, model, part)
        seconds = time.perf_counter() - start_s
        if turn == 0:
            self.cold[name] = seconds
        elif turn > 1:
            assert handle.info.from_image
            self.warm.setdefault(name, []).append(seconds)
            for phase, value in handle.phases.items():
                self.phases.setdefault(phase, []).append(value)
        start_s = time.perf_counter()
        await handle.deactivate()
        self.down.append(time.perf_counter() - start_s)
        self.own_bytes = psutil.Process(handle.pids[0]).memory_full_info().uss

    def show(self) -> float:
        print(f"{self.name}\n{'model':16}{'weights':>10}{'cold':>9}{'p50':>9}{'p95':>9}{'copy floor':>12}")
        for model in self.models:
            name, size = model.name, model.weight_bytes
            ordered = sorted(self.warm[name])
            p50, p95 = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
            columns = (self.cold[name], p50, p95, copy_seconds(size))
            print(f"{name:16}{size / 2**20:7.1f}MiB" + "".join(f"{1000 * v:7.1f}ms" for v in columns))
        every = [v for values in self.warm.values() for v in values]
        middle = statistics.median(every)
        print(f"all models: p50 {1000 * middle:.1f} ms of {len(every)}")
        print("phases, p50: " + ", ".join(f"{k} {1000 * statistics.median(v):.1f} ms" for k, v in self.phases.items()))
        print(
            f"deactivate, p50: {1000 * statistics.median(self.down):.1f} ms; {self.own_bytes / 2**20:.0f} MiB its own"
        )
        return middle


def run(models: Sequence[ModelSpec], rounds: int) -> list[Side]:
    """Activates all ``models`` in turn, in two pools: one that keeps none built, one that keeps all."""
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        zygote = Path(folder) / "zygote.sock"
        command = [sys.executable, "-m", "prism.engine.zygote", "--socket", str(zygote)]
        with subprocess.Popen([*command, "--parent-pid", str(os.getpid())], cwd=ROOT) as process:
            try:
                return asyncio.run(compare(Path(folder), zygote, models, rounds))
            finally:
                process.kill()


async def compare(folder: Path, zygote: Path, models: Sequence[ModelSpec], rounds: int) -> list[Side]:
    sides = [
        Side(f"keeps {kept} models built", make_pool(folder / str(kept), zygote, kept), models)
        for kept in (0, len(models))
    ]
    try:
        for side in sides:
            await side.pool.start()
        for turn in range(rounds + 2):
            for model in models:
                for side in sides if turn % 2 else reversed(sides):
                    await side.turn(model, turn)
    finally:
        for side in sides:
            await side.pool.close()
    built, kept = (side.show() for side in sides)
    print(f"p50 of built anew over kept: {built / kept:.2f}")
    return sides


def make_pool(folder: Path, zygote: Path, kept: int) -> EnginePool:
    options = PoolOptions(
        run_dir=folder / "run",
        account_dir=folder / "accounts",
        store_dir=folder / "store",
        zygote_socket=zygote,
        parked_per_device=1,
        max_per_device=1,
        kept_models=kept,
    )
    return EnginePool([DeviceSpec(DEVICE, NodeId("local"), DeviceKind.HOST, 256 << 20)], options)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of activating inactive demo models.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    folder = given_models(options.models)
    run([pool_spec(folder / name) for name in MODELS], options.rounds)


if __name__ == "__main__":
    main()
