"""Stage 4: what an activation of an 8B model consists of, what a parked engine keeps, and are its tokens right?"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from scripts.gpu.bench_rig import OUTER, bench, model, used_bytes
from scripts.gpu.run import Run
from scripts.gpu.stage import ROOT, Item, Stage, run_stage

PROMPTS: Final = [[(7 * seed + 13 * i) % 1900 + 10 for i in range(60)] for seed in range(4)]
NEW_TOKENS: Final = 16
LEAKS_S: Final = 130
"""Most of the item's limit: on a slow machine there are fewer activations, and it is said how many."""
GOALS: Final = {"first time": 28.0, "again": 1.2, "woken": 0.5}
"""From the files, from host memory, and by a worker that keeps the model built."""


def write_model(run: Run) -> None:
    """16 GB of random weights in host memory."""
    start_s = time.perf_counter()
    folder = model(run, "8b")
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    run.reading("weights", size / 1e9, "GB")
    run.remark(f"made or found in {time.perf_counter() - start_s:.1f} s")


def graphs_off(run: Run) -> None:
    """Prism's own setting: no graphs for prefill."""
    asyncio.run(_phases(run, prefill_graphs=False))
    run.needs_gpu()


def graphs_on(run: Run) -> None:
    """SGLang's default, for comparison."""
    run.needs_gpu()
    asyncio.run(_phases(run, prefill_graphs=True))


async def _phases(run: Run, *, prefill_graphs: bool) -> None:
    folder, extra = model(run, "8b"), {"disable_prefill_cuda_graph": False} if prefill_graphs else {}
    async with bench(run) as at:
        parked = used_bytes()
        run.reading("parked, outside of pages", at.outside_bytes() / 2**30, "GiB", goal=0.5)
        is_kept = False
        for when, goal in GOALS.items():
            handle, seconds = await at.activate(folder, **extra)
            first_s = seconds + await at.first_token_s(handle, PROMPTS[0])
            run.reading(f"{when}: parked engine to first token", first_s, "s", goal=None if prefill_graphs else goal)
            run.remark(f"{when}: " + ", ".join(f"{phase} {value:.3f}" for phase, value in handle.phases.items()))
            run.reading(f"{when}: active, over parked", (used_bytes() - parked) / 2**30, "GiB")
            run.reading(f"{when}: active, outside of pages", at.outside_bytes(handle) / 2**30, "GiB", goal=2.0)
            await handle.deactivate()
            kept = None if when == "first time" else 1.5
            run.reading(f"{when}: parked again, over parked", (used_bytes() - parked) / 2**30, "GiB", goal=kept or 0.3)
            run.check(("wake" in handle.phases) == is_kept, f"{when}: {', '.join(handle.phases)}")
            is_kept = handle.info.from_image  # one that was loaded from files is not kept built


def tokens(run: Run) -> None:
    """Greedy tokens against Hugging Face in the same precision. Random weights decide narrowly, so the same model in
    bfloat16 may differ after a while: the first token of each prompt must agree."""
    folder = model(run, "8b")
    command = [sys.executable, "-m", "scripts.gpu.reference", str(folder), "float32" if run.dry else "bfloat16"]
    text = json.dumps({"prompts": PROMPTS, "new_tokens": NEW_TOKENS})
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, env=OUTER, check=False)
    run.check(done.returncode == 0, f"the reference ended with {done.returncode}: {done.stderr[-300:]}")
    if done.returncode == 0:
        asyncio.run(_tokens(run, folder, json.loads(done.stdout.splitlines()[-1])))
    run.needs_gpu()


async def _tokens(run: Run, folder: Path, expected: list[list[int]]) -> None:
    async with bench(run) as at:
        exact: dict[str, Any] = {"dtype": "float32"} if run.dry else {}
        handle, _ = await at.activate(folder, **exact)
        found = [await at.generate(handle, prompt, NEW_TOKENS) for prompt in PROMPTS]
        await handle.deactivate()
    agreed = [
        next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), NEW_TOKENS)
        for a, b in zip(found, expected, strict=True)
    ]
    run.check(min(agreed) > 0, f"a first token differs: {found} against {expected}")
    run.reading("tokens that agree", statistics.mean(agreed), f"of {NEW_TOKENS}", goal=NEW_TOKENS, less_is_better=False)


def leaks(run: Run) -> None:
    """Activations one after the other: does the memory that a parked engine holds grow, do they get slower?"""
    asyncio.run(_leaks(run, model(run, "0.6b"), 3 if run.dry else 200))
    run.needs_gpu()


async def _leaks(run: Run, folder: Path, most: int) -> None:
    held, times = [], list[float]()
    async with bench(run) as at:
        begun_s = time.perf_counter()
        while len(times) < most and (len(times) < 3 or time.perf_counter() - begun_s < LEAKS_S):
            handle, seconds = await at.activate(folder)
            await at.generate(handle, PROMPTS[0], 4)
            await handle.deactivate()
            held.append(used_bytes())
            times.append(seconds)
        run.check(at.rig.pool.memory[at.device].audit().problems == (), "the account and the driver disagree")
    run.remark(f"{len(times)} activations")
    run.reading("growth from the third to the last", (held[-1] - held[2]) / 2**20, "MiB", goal=16)
    run.reading("median activation, 0.6B", statistics.median(times[2:]), "s", goal=0.5)


STAGE = Stage(
    "scripts.gpu.stage4_activation",
    __doc__,
    (
        Item("write_model", write_model, 120),
        Item("graphs_off", graphs_off, 180),
        Item("graphs_on", graphs_on, 180),
        Item("tokens", tokens, 180),
        Item("leaks", leaks, 180),
    ),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
