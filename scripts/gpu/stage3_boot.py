"""Stage 3: does an engine come up on the GPU, what does it import, compile and hold, and does a 0.6B model answer?"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import sys
import time
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Final

from prism.engine.kernels import compiled_kernels
from scripts.gpu.bench_rig import Bench, bench, model, used_bytes
from scripts.gpu.run import Run
from scripts.gpu.stage import Item, Stage, run_stage

NOT_INITIALISED: Final = 3
PROMPT: Final = [(7 * i) % 1900 + 10 for i in range(200)]


def boot(run: Run) -> None:
    """Each module that an engine imports: its seconds, and whether the driver was initialised by it (a context of a
    parked process costs half a gigabyte, and none can be inherited by a fork)."""
    from prism.engine import boot as engine
    from prism.engine import cuda_stub

    engine.prepare_environment("host" if run.dry else "cuda")
    cuda_stub.load()
    if run.dry:
        load_hopper_kernels()
    start_s = time.perf_counter()
    for name in engine.WARM_MODULES:
        module_s = time.perf_counter()
        importlib.import_module(name)
        run.remark(f"{name} {time.perf_counter() - module_s:.1f} s")
        if not run.dry:
            run.check(not driver_initialised(), f"importing {name} initialised the driver")
    engine.apply_patches()
    run.reading("imports", time.perf_counter() - start_s, "s", goal=25)
    run.needs_gpu()


def load_hopper_kernels() -> None:
    """Without a GPU ``sgl_kernel`` takes the library for other GPUs, which the kit leaves out; it finds this one by
    name instead. In a full installation it finds its own."""
    found = util.find_spec("sgl_kernel")
    folder = Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else Path()
    if (folder / "sm100").exists() or not (folder / "sm90").exists():
        return
    importlib.import_module("torch")  # which the library links against
    name = "common_ops"
    spec = util.spec_from_file_location(name, next((folder / "sm90").glob(f"{name}.*")))
    assert spec is not None and spec.loader is not None
    sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def driver_initialised() -> bool:
    context = ctypes.c_void_p()
    return bool(ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) != NOT_INITIALISED)


def small_model(run: Run) -> None:
    """Activate, answer, deactivate, three times; the first time compiles kernels."""
    folder = model(run, "0.6b")
    asyncio.run(_small_model(run, folder))
    run.needs_gpu()


async def _small_model(run: Run, folder: Path) -> None:
    before = compiled_kernels()
    async with bench(run) as at:
        parked = used_bytes()
        answers = [await _turn(run, at, folder, turn) for turn in range(3)]
        run.check(answers[0] == answers[1] == answers[2], f"greedy answers differ: {answers}")
        run.reading("held after the third, over parked", (used_bytes() - parked) / 2**30, "GiB", goal=0.3)
    new = sorted(path.name for path in compiled_kernels() - before)
    run.remark(f"{len(new)} compiled files: {', '.join(new)[:400]}")


async def _turn(run: Run, at: Bench, folder: Path, turn: int) -> Sequence[int]:
    handle, seconds = await at.activate(folder)
    name = ("first", "second", "third")[turn]
    run.reading(f"{name} activation", seconds, "s", goal=(120, 1.5, 1.5)[turn])
    run.remark(f"{name}: " + ", ".join(f"{phase} {value:.3f}" for phase, value in handle.phases.items()))
    run.check(turn == 0 or handle.info.from_image, f"the {name} activation read the model's files")
    run.reading(f"{name} time to first token", await at.first_token_s(handle, PROMPT), "s", goal=(120, 0.1, 0.1)[turn])
    start_s = time.perf_counter()
    tokens = await at.generate(handle, PROMPT[:100], 32)
    run.check(len(tokens) == 32, f"{len(tokens)} tokens instead of 32")
    run.reading(f"{name} time per token", 1e3 * (time.perf_counter() - start_s) / 32, "ms")
    start_s = time.perf_counter()
    await handle.deactivate()
    run.reading(f"{name} deactivation", time.perf_counter() - start_s, "s", goal=0.2)
    return tokens


STAGE = Stage(
    "scripts.gpu.stage3_boot",
    __doc__,
    (Item("boot", boot, 150), Item("small_model", small_model, 330)),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
