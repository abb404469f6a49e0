"""Stage 5: two engines on one GPU that lend each other memory, and what happens when one dies, when a kernel goes
astray and when the GPU is really full."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

from prism.engine.errors import ActivationCause, CannotActivate
from prism.engine.events import Died
from prism.engine.handle import EngineHandle
from prism.memory.outside import FOREIGN_WINDOW_S
from scripts.gpu.bench_rig import OUTER, Bench, bench, model
from scripts.gpu.route import route
from scripts.gpu.run import Run
from scripts.gpu.stage import ROOT, Item, Stage, run_stage
from tests.engine.rig import tokenized

LONG: Final = 400
LEFT_BYTES: Final = 1 << 30
SQUEEZED_BYTES: Final = 256 << 20
ASTRAY: Final = """
import cupy
kernel = cupy.RawKernel('extern "C" __global__ void astray(float* p) { p[1ull << 40] = 1.0f; }', "astray")
kernel((1,), (1,), (cupy.zeros(1, cupy.float32),))
cupy.cuda.runtime.deviceSynchronize()
"""
BALLAST: Final = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - {left}), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


def prompt(seed: int, length: int = 60) -> list[int]:
    return [(7 * seed + 13 * i) % 1900 + 10 for i in range(length)]


async def two(run: Run, at: Bench) -> tuple[EngineHandle, EngineHandle]:
    """Engines of two models of the same weights."""
    first, _ = await at.activate(model(run, "0.6b"))
    second, _ = await at.activate(model(run, "0.6b", copy="b"))
    return first, second


def lending(run: Run) -> None:
    """Both engines answer together as each does alone, and memory that one leaves the other takes."""
    asyncio.run(_lending(run))
    run.needs_gpu()


async def _lending(run: Run) -> None:
    async with bench(run) as at:
        first, second = await two(run, at)
        alone = [await at.generate(handle, prompt(1), 16) for handle in (first, second)]
        run.check(alone[0] == alone[1], f"the same model answers differently in two engines: {alone}")
        both = await asyncio.gather(*(at.generate(h, prompt(1), 16) for h in (first, second) for _ in range(4)))
        run.check(all(answer == alone[0] for answer in both), "an answer changed while the other engine computed")
        account = at.rig.pool.memory[at.device]
        run.reading("KV and weights of both", (account.capacity_bytes - account.free_bytes()) / 2**20, "MiB")
        await first.deactivate()
        run.check(await at.generate(second, prompt(1), 16) == alone[0], "an answer changed after the other left")
        await second.deactivate()
        audit = account.audit()
        run.check(not audit.problems, f"the account and the driver disagree: {audit.problems}")


def killed(run: Run) -> None:
    """SIGKILL for one engine in the middle of answers: the other's go on, and its memory comes back."""
    asyncio.run(_killed(run))
    run.needs_gpu()


async def _killed(run: Run) -> None:
    async with bench(run) as at:
        first, second = await two(run, at)
        expected = await at.generate(second, prompt(2), LONG // 4)
        at.rig.submit(first, tokenized("", prompt(3), LONG))
        going = at.rig.submit(second, tokenized("", prompt(2), LONG // 4))
        await at.rig.wait_tokens(going, 2)
        os.kill(first.pids[0], signal.SIGKILL)
        run.check(await at.rig.answer(going) == expected, "the other engine's answer changed")
        run.check(any([isinstance(event, Died) async for event in first.events()]), "nobody heard that the engine died")
        account = at.rig.pool.memory[at.device]
        account.reap()
        run.check(not (problems := account.audit().problems), f"the account and the driver disagree: {problems}")
        again, seconds = await at.activate(model(run, "0.6b"))
        run.reading("the killed model again", seconds, "s", goal=30)
        await again.deactivate()
        await second.deactivate()


def astray(run: Run) -> None:
    """A kernel of another process that writes where it may not: engines beside it go on (without MPS they must)."""
    asyncio.run(_astray(run))


async def _astray(run: Run) -> None:
    async with bench(run) as at:
        handle, _ = await at.activate(model(run, "0.6b"))
        expected = await at.generate(handle, prompt(4), 16)
        run.needs_gpu()
        said = await asyncio.to_thread(go_astray)
        run.check("illegal" in said.lower(), f"the kernel that went astray was not stopped: {said}")
        run.check(await at.generate(handle, prompt(4), 16) == expected, "an answer changed after the illegal access")
        await handle.deactivate()


def go_astray() -> str:
    """The end of what the process that did it said."""
    command = [sys.executable, "-c", ASTRAY]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=OUTER).stderr[-300:]


def full(run: Run) -> None:
    """Another user of the GPU leaves one GiB: an activation is refused with its reason, nothing crashes, and it works
    again when the other is gone."""
    asyncio.run(_full(run))


async def _full(run: Run) -> None:
    async with bench(run) as at:
        folder = model(run, "0.6b")
        run.needs_gpu()
        with ballast():
            try:
                handle, _ = await at.activate(folder)
            except CannotActivate as error:
                refused = error.cause is ActivationCause.OUT_OF_MEMORY
                run.check(refused, f"refused as {error.cause}, not for want of memory: {error}")
            else:
                run.check(False, "it was activated where there is no memory")
                await handle.deactivate()
        handle, _ = await at.activate(folder)
        run.check(len(await at.generate(handle, prompt(5), 8)) == 8, "no answer after the memory came back")
        await handle.deactivate()


def beside(run: Run) -> None:
    """Another user of the GPU takes half of what is free while an engine answers, and gives it back: answers go on, the
    account sees it come and, after a while, go."""
    asyncio.run(_beside(run))
    run.needs_gpu()


async def _beside(run: Run) -> None:
    async with bench(run) as at:
        handle, _ = await at.activate(model(run, "0.6b"))
        expected = await at.generate(handle, prompt(6), 32)
        free = at.account.free_bytes()
        run.reading("free before", free / 2**30, "GiB")
        if not run.dry:
            with ballast(free // 2):
                at.look()
                taken = free - at.account.free_bytes()
                run.reading("seen of what another took", taken / (free // 2), "x", goal=0.9, less_is_better=False)
                both = await asyncio.gather(*(at.generate(handle, prompt(6), 32) for _ in range(4)))
                run.check(all(answer == expected for answer in both), "an answer changed while another took memory")
            await asyncio.sleep(FOREIGN_WINDOW_S + 2)
            at.look()
            back = free - at.account.free_bytes()
            run.check(back < free // 20, f"{back} bytes are still missing after the other has gone")
        run.check(await at.generate(handle, prompt(6), 32) == expected, "an answer changed afterwards")
        await handle.deactivate()


def squeezed(run: Run) -> None:
    """Another user of the GPU leaves a quarter of a GiB to an engine amid answers: steps that find no room are begun
    again smaller, and the engine lives."""
    asyncio.run(_squeezed(run))
    run.needs_gpu()


async def _squeezed(run: Run) -> None:
    count, length, new = (2, 20, 4) if run.dry else (16, 1500, 64)
    async with bench(run) as at:
        handle, _ = await at.activate(model(run, "0.6b"))
        expected = await at.generate(handle, prompt(7), 16)
        with nullcontext() if run.dry else ballast(SQUEEZED_BYTES):
            rids = [at.rig.submit(handle, tokenized("", prompt(i, length), new)) for i in range(count)]
            whole = [len(await at.rig.answer(rid, timeout_s=60.0)) == new for rid in rids]
        refused = [at.rig.finish[rid] for rid, ended in zip(rids, whole, strict=True) if not ended]
        run.check(all(end.get("status_code") == 503 for end in refused), f"ended otherwise: {refused}"[:400])
        run.remark(
            f"{len(refused)} of {count} refused, {0 if handle.load is None else handle.load.retractions} retracted"
        )
        run.check(handle.alive, "the engine did not survive")
        run.check(await at.generate(handle, prompt(7), 16) == expected, "an answer changed afterwards")
        await handle.deactivate()


@contextmanager
def ballast(left_bytes: int = LEFT_BYTES) -> Iterator[None]:
    """Another process holds all but so much."""
    command = [sys.executable, "-c", BALLAST.format(left=left_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=OUTER) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the process that fills the GPU ended")
            yield
        finally:
            process.stdin.close()


STAGE = Stage(
    "scripts.gpu.stage5_sharing",
    __doc__,
    (
        Item("lending", lending, 150),
        Item("killed", killed, 150),
        Item("astray", astray, 120),
        Item("full", full, 150),
        Item("beside", beside, 150),
        Item("squeezed", squeezed, 120),
        Item("route", route, 150),
    ),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
