"""Stage 1: is the memory of the GPU what Prism takes it for, and what do its pages cost?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prism import memory
from prism.engine.gpu import cuda_home, mps_remark
from prism.memory.gpus import NoDriver, read_gpus
from scripts.gpu.driver import MIB
from scripts.gpu.driver_times import time_one_allow, time_pages
from scripts.gpu.holder import held
from scripts.gpu.memory_bed import driver_library, open_driver, owner_on_gpu
from scripts.gpu.mps import compare_with_mps
from scripts.gpu.run import Run
from scripts.gpu.stage import ROOT, Item, Stage, run_stage


def discovery(run: Run) -> None:
    """Does Prism see the GPU, and what stands in its way?"""
    home = cuda_home()
    run.remark(f"CUDA compiler: {home / 'bin' / 'nvcc' if home else 'none'}; {mps_remark()}")
    try:
        found = read_gpus()
    except NoDriver as reason:
        run.remark(f"driver: {reason}")
        run.needs_gpu()
        raise
    for gpu in found.gpus:
        run.check(not gpu.problem, f"cuda:{gpu.index}: {gpu.problem}")
        run.remark(f"cuda:{gpu.index} {gpu.name}, NUMA node {gpu.numa_node}, NVLink to {gpu.nvlinks}")
    run.check(bool(found.gpus) or run.dry, "the driver shows no GPU")
    run.check(home is not None or run.dry, "no nvcc: SGLang compiles kernels at their first use")


def driver_calls(run: Run) -> None:
    """What one page costs, by size, exportable or not, apart from everything of Prism's."""
    driver = open_driver(run)
    run.check(driver.granularity_bytes() == 2 * MIB, f"the granule is {driver.granularity_bytes()} bytes, not 2 MiB")
    for mib, pages in ((2, 256), (32, 64), (64, 32)):
        for export in (False, True):
            times = time_pages(driver, mib * MIB, 4 if run.dry else pages, export=export)
            name = f"{mib} MiB{' exportable' if export else ''}"
            run.reading(f"new page of {name}", times.to_map_us(), "us", goal=110 if mib == 2 else None)
            run.remark(f"{name}: {times.words()}")
            if mib == 2 and not export:
                run.reading("p99 of mapping it", times.p99_us("create", "map", "allow"), "us")
                run.reading("p99 of unmapping it", times.p99_us("unmap", "release"), "us")
    run.reading(
        "access, one call for many pages of 2 MiB", time_one_allow(driver, 2 * MIB, 4 if run.dry else 256), "us/page"
    )


def under_load(run: Run) -> None:
    """Do the driver's calls wait for a kernel that is running?"""
    driver = open_driver(run)
    pages = 4 if run.dry else 128
    idle = time_pages(driver, 2 * MIB, pages)
    run.reading("idle: new page of 2 MiB", idle.to_map_us(), "us")
    run.needs_gpu()
    import torch

    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(600):
        matrix @ matrix
    done.record()
    busy = time_pages(driver, 2 * MIB, pages)
    run.check(not done.query(), "the kernels were over before the calls were: nothing was measured under load")
    run.reading("busy: new page of 2 MiB", busy.to_map_us(), "us", goal=2 * idle.to_map_us())
    run.remark(f"busy: {busy.words()}")


def contexts(run: Run) -> None:
    """Memory that a process takes outside every account: its context, then torch's workspaces."""
    driver, library = open_driver(run), driver_library(run)
    before = driver.free_bytes()
    for count in (1, 4):
        with held(library, count):
            each = (before - driver.free_bytes()) / count / 2**30
        run.reading(f"context, {count} processes, each", each, "GiB", goal=0.55)
    run.needs_gpu()
    with held(library, 1, torch=True):
        run.reading("context and torch after one product", (before - driver.free_bytes()) / 2**30, "GiB", goal=1.0)


def old_contents(run: Run) -> None:
    """Can a page show what its last owner wrote? Both through the driver and through Prism's spare pages."""
    driver = open_driver(run)
    page, pages = 2 * MIB, 8 if run.dry else 512
    start = driver.reserve(page * pages)
    seen = 0
    for turn in range(2):
        handles = [driver.create(page) for _ in range(pages)]
        for index, handle in enumerate(handles):
            driver.map(start + page * index, page, handle)
        driver.allow(start, page * pages)
        if turn == 1:
            seen = sum(any(driver.read(start + page * i, 4096)) for i in range(pages))
        driver.fill(start, 0xA5, page * pages)
        driver.unmap(start, page * pages)
        for handle in handles:
            driver.release(handle)
    driver.free_address(start, page * pages)
    run.reading("driver's pages with old contents", seen, f"of {pages}")
    run.remark("the driver clears pages" if seen == 0 else "the driver does not clear pages: Prism must, or accept it")


def seen(run: Run) -> None:
    """Does the driver name our process and what it holds, so that Prism can charge it? (Not in a container of its own
    process ids.)"""
    library = driver_library(run)
    run.needs_gpu()
    total = read_gpus().gpus[0].memory_bytes
    with tempfile.TemporaryDirectory() as folder:
        device = memory.open_device("cuda:0", int(0.95 * total), account_dir=Path(folder))
        with device.register("kit") as owner:
            owner.weight_region(64 * MIB).commit()
            meter = memory.NvmlMeter(read_gpus().gpus[0].uuid)
            start_s = time.perf_counter()
            memory.MemoryWatch(device, meter).look(0.0)
            run.reading("one look", 1e3 * (time.perf_counter() - start_s), "ms", goal=10)
            mine = device.stats().owners[0].measured_bytes
            run.reading("outside of pages, ours", mine / 2**30, "GiB", goal=0.55)
            run.check(mine > 0, "the driver does not name this process: what is beside pages counts as others'")
            before = device.foreign_bytes()
            with held(library, 2):
                memory.MemoryWatch(device, meter).look(1.0)
                run.reading("two strangers with a context", (device.foreign_bytes() - before) / 2**30, "GiB")


def prism_pages(run: Run) -> None:
    """Prism's commit of weights against the driver's own calls for as many pages of the same size, in turns."""
    pages = 4 if run.dry else 64
    driver, nbytes = open_driver(run), pages * 32 * MIB
    with owner_on_gpu(run, 2 * nbytes if not run.dry else 512 * MIB) as owner:
        region = owner.weight_region(nbytes)
        ours, theirs = [], []
        for _ in range(3 if run.dry else 9):
            theirs.append(time_pages(driver, region.page_bytes, pages).to_map_us())
            start_s = time.perf_counter()
            region.commit()
            ours.append((time.perf_counter() - start_s) * 1e6 / pages)
            region.decommit()
        region.close()
    floor = statistics.median(theirs)
    run.reading("weights' page of 32 MiB", statistics.median(ours), "us", goal=1.2 * floor, limit=floor)


def tests(run: Run) -> None:
    """The tests of the memory package that the fake driver passes, on the real one."""
    command = [sys.executable, "-m", "pytest", "tests/memory", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    # Where the kit goes, pytest-asyncio is missing, which the settings name.
    command += ["-p", "no:asyncio", "-W", "ignore::pytest.PytestConfigWarning"]
    command += ["--collect-only"] if run.dry else ["--maxfail=5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    run.remark(lines[-1] if lines else done.stderr[-300:])
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    run.check(done.returncode == 0, f"pytest ended with status {done.returncode}: {'; '.join(failed)[:400]}")
    run.needs_gpu()
    run.check(" passed" in lines[-1], "no test of the real driver ran")


def mapped(run: Run) -> None:
    """``benchmarks.memory.mapped``: bytes mapped per second, and decode attention over pages against plain tensors."""
    import torch

    from benchmarks.memory import mapped as benchmark

    goals: dict[str, float] = {"decode attention, pool over plain torch": 1.01}

    def note(what: str, value: float, unit: str, _goal: str = "") -> None:
        rate = "/s" in what
        run.reading(what, value, unit, goal=goals.get(what), is_estimate=False, less_is_better=not rate)

    settings: dict[str, Any] = {"report": note}
    if run.dry:
        settings |= {"SEQUENCES": 2, "TOKENS": 32, "ROUNDS": 1, "REGION_BYTES": 8 * MIB}
    for name, value in settings.items():
        setattr(benchmark, name, value)
    name = "host:0" if run.dry else "cuda:0"
    with (
        tempfile.TemporaryDirectory() as folder,
        memory.open_device(name, 12 << 30, account_dir=Path(folder)).register("kit") as owner,
    ):
        device = torch.device("cpu" if run.dry else "cuda:0")
        benchmark.mapping(owner, device)
        benchmark.decode(owner, device)
    run.needs_gpu()


def mps(run: Run) -> None:
    """Two processes that compute on one GPU, in turns and under MPS."""
    compare_with_mps(run)


STAGE = Stage(
    "scripts.gpu.stage1_memory",
    __doc__,
    (
        Item("discovery", discovery, 60),
        Item("driver_calls", driver_calls, 90),
        Item("under_load", under_load, 90),
        Item("contexts", contexts, 120),
        Item("old_contents", old_contents, 60),
        Item("seen", seen, 60),
        Item("prism_pages", prism_pages, 60),
        Item("tests", tests, 180),
        Item("mapped", mapped, 120),
        Item("mps", mps, 90),
    ),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
