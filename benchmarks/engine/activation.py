"""How long does an inactive model take to become ready when its weights are in host memory and a worker is parked?

    python -m benchmarks.engine.activation [--rounds 20] [--models DIR]

Rounds over the three demo models in one worker: activate, answer one request, deactivate. The first activation of each
model reads its files and is shown apart. Beside it stands the floor: a plain memory copy of the same weights, in the
same run. Goal: p50 <= 250 ms.

Last result: docs/results/engine.md.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import DeviceKind, DeviceSpec, ModelShape, ModelSpec
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool

ROOT = Path(__file__).resolve().parents[2]

DEVICE = DeviceId("local/host:0")
MODELS = ("demo-llama", "demo-qwen3", "demo-stablelm")


def spec(folder: Path) -> ModelSpec:
    shape = ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocab=1)
    nbytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return ModelSpec(ModelName(folder.name), str(folder), 1.0, 0.1, nbytes, shape, 0)


def copy_seconds(nbytes: int) -> float:
    """Median of a plain copy of ``nbytes`` between two warm buffers."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    times = []
    for _ in range(9):
        start_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


async def measure(pool: EnginePool, models: Path, rounds: int) -> None:
    cold: dict[str, float] = {}
    warm: dict[str, list[float]] = {name: [] for name in MODELS}
    down: list[float] = []
    phases: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name in MODELS:
            key, (part,) = InstanceKey(ModelName(name), Generation(turn)), whole_model([DEVICE])
            start_s = time.perf_counter()
            handle = await pool.activate(key, spec(models / name), part)
            seconds = time.perf_counter() - start_s
            if turn == 0:
                cold[name] = seconds
            else:
                assert handle.info.from_image
                warm[name].append(seconds)
                for phase, value in handle.phases.items():
                    phases.setdefault(phase, []).append(value)
            start_s = time.perf_counter()
            await handle.deactivate()
            down.append(time.perf_counter() - start_s)
    print(f"{'model':16}{'weights':>10}{'cold':>9}{'p50':>9}{'p95':>9}{'copy floor':>12}")
    for name in MODELS:
        size = spec(models / name).weight_bytes
        ordered = sorted(warm[name])
        p50, p95 = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
        floor = copy_seconds(size)
        columns = (cold[name], p50, p95, floor)
        print(f"{name:16}{size / 2**20:7.1f}MiB" + "".join(f"{1000 * v:7.1f}ms" for v in columns))
    every = [v for values in warm.values() for v in values]
    print(f"all models: p50 {1000 * statistics.median(every):.1f} ms of {len(every)} (goal 250 ms)")
    print("phases, p50: " + ", ".join(f"{k} {1000 * statistics.median(v):.1f} ms" for k, v in phases.items()))
    print(f"deactivate, p50: {1000 * statistics.median(down):.1f} ms")


async def run(models: Path, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="prism-b-") as folder:
        options = PoolOptions(
            run_dir=Path(folder) / "run",
            account_dir=Path(folder) / "accounts",
            store_dir=Path(folder) / "store",
            parked_per_device=1,
        )
        pool = EnginePool([DeviceSpec(DEVICE, NodeId("local"), DeviceKind.HOST, 256 << 20)], options)
        start_s = time.perf_counter()
        await pool.start()
        print(f"zygote and parked worker up after {time.perf_counter() - start_s:.1f} s")
        try:
            await measure(pool, models, rounds)
        finally:
            await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of activating inactive demo models.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", type=Path)
    options = parser.parse_args()
    models = options.models
    if models is None:
        models = Path(tempfile.mkdtemp(prefix="prism-models-"))
        subprocess.run([sys.executable, str(ROOT / "scripts/make_demo_models.py"), str(models)], check=True)
    asyncio.run(run(models, options.rounds))


if __name__ == "__main__":
    main()
