"""An engine pool with a front door's mailbox, as the engine tests have it, on the GPU or, in a dry run, on a virtual
device with a tiny model."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prism import memory
from prism.core.ids import DeviceId, NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.handle import EngineHandle
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from prism.memory.gpus import NoDriver, read_gpus
from scripts.gpu.run import Run
from scripts.gpu.stage import ROOT
from tests.engine.rig import Rig, tokenized

OUTER: Final = dict(os.environ)
"""As it was before SGLang's codec, which hides GPUs from this process: for reading them and for other processes."""
CAPACITY: Final = 0.95
"""Of a GPU's memory, everything counted."""
PARKED_BYTES, ACTIVE_BYTES = 512 << 20, 4 << 30
"""What a worker is granted outside of its pages; twice the default, to find out what it takes."""
DRY_BYTES: Final = 256 << 20
SEATS: Final = 3
"""Most workers of the GPU."""


def used_bytes() -> int:
    """Memory of GPU 0 that any process holds, from the driver; 0 without a GPU."""
    try:
        return read_gpus(OUTER).gpus[0].used_bytes
    except NoDriver:
        return 0


def model(run: Run, shape: str, copy: str = "") -> Path:
    """The folder of a model of ``shape`` ("tiny" in a dry run), written once; ``copy`` names another one of it."""
    made = "tiny" if run.dry else shape
    folder = run.scratch / f"model-{made}"
    if not folder.exists():
        command = [sys.executable, "-m", "scripts.gpu.models", made, str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, env={**OUTER, "OMP_NUM_THREADS": "8"})
    if not copy:
        return folder
    other = run.scratch / f"model-{made}-{copy}"
    if not other.exists():
        shutil.copytree(folder, other, copy_function=os.link)
    return other


def layout_model(run: Run, name: str) -> Path:
    """The folder of a model of :data:`scripts.gpu.layouts.SHAPES`, written once."""
    folder = run.scratch / f"layout-{name}{'-tiny' if run.dry else ''}"
    if not folder.exists():
        tokenizer = model(run, "tiny")
        command = [sys.executable, "-m", "scripts.gpu.layouts", name, str(folder), str(tokenizer)]
        command += ["--tiny"] if run.dry else []
        subprocess.run(command, cwd=ROOT, check=True, env={**OUTER, "OMP_NUM_THREADS": "8"})
    return folder


@dataclass
class Bench:
    """``rig`` with its devices; what is measured is measured on the first."""

    run: Run
    rig: Rig
    device: DeviceId
    watch: memory.MemoryWatch | None
    """None in a dry run: virtual devices have no strangers."""

    @property
    def account(self) -> memory.Device:
        return self.rig.pool.memory[self.device]

    def look(self) -> None:
        """Have the account know what the driver sees now."""
        if self.watch is not None:
            self.watch.look(time.monotonic())

    def outside_bytes(self, handle: EngineHandle | None = None) -> int:
        """What the engine, or the first parked worker, takes beside its pages as the driver sees it."""
        self.look()
        pids = [] if handle is None else handle.pids
        owners = [o for o in self.account.stats().owners if not pids or o.pid in pids]
        return max((o.measured_bytes for o in owners), default=0)

    async def activate(self, folder: Path, ranks: int = 1, **engine_args: Any) -> tuple[EngineHandle, float]:
        """An engine of the model on the first ``ranks`` devices, and the seconds it took."""
        start_s = time.perf_counter()
        spec = self.rig.spec_at(folder, ranks, **engine_args)
        handle = await self.rig.activate(spec, self.rig.devices[:ranks])
        return handle, time.perf_counter() - start_s

    async def generate(self, handle: EngineHandle, prompt: Sequence[int], new_tokens: int) -> list[int]:
        return await self.rig.ask(handle, tokenized("", prompt, new_tokens))

    async def first_token_s(self, handle: EngineHandle, prompt: Sequence[int]) -> float:
        """From submitting to the first token."""
        start_s = time.perf_counter()
        rid = self.rig.submit(handle, tokenized("", prompt, 1))
        await self.rig.wait_tokens(rid, 1)
        return time.perf_counter() - start_s


def store_folder(run: Run) -> Path:
    """The disk tier of the weights' store, on a disk: memory holds the models' files and the host tier already."""
    return Path(tempfile.gettempdir()) / ("prism-kit-store-dry" if run.dry else "prism-kit-store")


def device_spec(run: Run, index: int = 0) -> DeviceSpec:
    if run.dry:
        return DeviceSpec(DeviceId(f"local/host:{index}"), NodeId("local"), DeviceKind.HOST, DRY_BYTES)
    nbytes = int(CAPACITY * read_gpus(OUTER).gpus[index].memory_bytes)
    return DeviceSpec(DeviceId(f"local/cuda:{index}"), NodeId("local"), DeviceKind.CUDA, nbytes)


def need_gpus(run: Run, count: int) -> None:
    """Ends the item where there are fewer; a dry run has as many virtual devices as it likes."""
    if not run.dry and len(read_gpus(OUTER).gpus) < count:
        run.skip(f"needs {count} GPUs")


@asynccontextmanager
async def bench(run: Run, gpus: int = 1, **options: Any) -> AsyncIterator[Bench]:
    """A zygote and a pool with one parked worker for each of the first ``gpus`` devices; all end with the block. Says
    how long the start took. ``options``: further ones of the pool."""
    folder = Path(tempfile.mkdtemp(prefix="prism-k-"))
    specs = [device_spec(run, index) for index in range(gpus)]
    spec = specs[0]
    start_s = time.perf_counter()
    zygote = start_zygote(folder, spec.kind)
    try:
        rig = Rig(folder, run.scratch, folder / "zygote.sock")
        rig.devices = tuple(each.id for each in specs)
        rig.pool = EnginePool(
            specs,
            PoolOptions(
                run_dir=folder / "run",
                account_dir=folder / "accounts",
                store_dir=store_folder(run),
                zygote_socket=folder / "zygote.sock",
                max_per_device=SEATS,
                start_timeout_s=300.0,
                parked_bytes=0 if run.dry else PARKED_BYTES,
                active_bytes=0 if run.dry else ACTIVE_BYTES,
                **options,
            ),
        )
        await rig.start()
        run.reading("zygote and parked worker", time.perf_counter() - start_s, "s", goal=30)
        made = Bench(run, rig, spec.id, watch_of(run, rig.pool.memory[spec.id]))
        looking = asyncio.create_task(_look_on(made))
        try:
            yield made
        finally:
            looking.cancel()
            await rig.close()
    finally:
        zygote.kill()
        zygote.wait()
        shutil.rmtree(folder, ignore_errors=True)


def watch_of(run: Run, device: memory.Device) -> memory.MemoryWatch | None:
    return None if run.dry else memory.MemoryWatch(device, memory.NvmlMeter(read_gpus(OUTER).gpus[0].uuid))


async def _look_on(bench: Bench) -> None:
    """As an agent does."""
    while True:
        await asyncio.to_thread(bench.look)
        await asyncio.sleep(1.0)


def start_zygote(folder: Path, kind: DeviceKind) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "prism.engine.zygote", "--socket", str(folder / "zygote.sock")]
    command += ["--kind", kind.value, "--parent-pid", str(os.getpid())]
    return subprocess.Popen(command, cwd=ROOT, env=OUTER)
