"""Is a model whose attention keeps something else than K and V as quick to activate as a plain one of its size?

    python -m benchmarks.engine.layouts [--rounds 15]

Tiny models of four layers and about as many weights (tests/engine/families.py makes them), all with Triton's
attention, so that only the layout differs: plain (Qwen3-MoE), latent rows (DeepSeek-V3), sliding windows beside full
attention (Mellum). Rounds over the three in one worker: activate from the image, deactivate; they take turns. Goal:
p50 at most 1.5 times plain's.

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
from dataclasses import replace
from pathlib import Path

from benchmarks.engine.activation import DEVICE, ROOT, spec
from prism.core.ids import Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import DeviceKind, DeviceSpec, ModelSpec
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from tests.engine.families import EXPERTS, TRITON, Family, make_model, named

GOAL = 1.5
LAYERS = {"num_hidden_layers": 4}


def chosen() -> dict[str, Family]:
    plain = Family(
        config="Qwen3Moe", serves="", layout="", options={**LAYERS, **EXPERTS, "head_dim": 32}, engine=TRITON
    )
    latent = named("DeepseekV3")
    return {
        "plain": plain,
        "latent rows": replace(latent, options=latent.options | LAYERS),
        "windows": named("Mellum"),
    }


async def measure(pool: EnginePool, specs: dict[str, ModelSpec], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in specs}
    for turn in range(rounds + 1):
        for name, model in specs.items():
            key, (part,) = InstanceKey(ModelName(model.name), Generation(turn)), whole_model([DEVICE])
            start_s = time.perf_counter()
            handle = await pool.activate(key, model, part)
            if turn:
                assert handle.info.from_image
                found[name].append(time.perf_counter() - start_s)
            await handle.deactivate()
    return found


async def run(folder: Path, specs: dict[str, ModelSpec], rounds: int) -> None:
    options = PoolOptions(
        run_dir=folder / "run", account_dir=folder / "accounts", store_dir=folder / "store", parked_per_device=1
    )
    pool = EnginePool([DeviceSpec(DEVICE, NodeId("local"), DeviceKind.HOST, 256 << 20)], options)
    await pool.start()
    try:
        found = await measure(pool, specs, rounds)
    finally:
        await pool.close()
    plain_s = statistics.median(found["plain"])
    print(f"{'layout':14}{'weights':>10}{'p50':>9}{'over plain':>12}   goal {GOAL}")
    for name, seconds in found.items():
        p50_s = statistics.median(seconds)
        size = specs[name].weight_bytes / 2**20
        print(f"{name:14}{size:7.1f}MiB{1000 * p50_s:7.1f}ms{p50_s / plain_s:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of activating models of several layouts.")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prism-b-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, str(ROOT / "scripts/make_demo_models.py"), str(folder / "demo")], check=True)
        specs = {
            layout: replace(
                spec(make_model(family, folder / family.config, folder / "demo" / "demo-llama")),
                engine_args=tuple(family.engine.items()),
            )
            for layout, family in chosen().items()
        }
        asyncio.run(run(folder, specs, options.rounds))


if __name__ == "__main__":
    main()
