"""What does a slot, and a page, cost from Python?

    python -m benchmarks.memory.slots [--rival-python PYTHON]

Prints alloc+free of 1, 16, 256 and 1024 slots in mapped pages, then a page out and in again with a pooled handle on the
fake CUDA driver in its no-op mode, where the time of the calls into the driver (measured alone) is subtracted, and on
host memory for comparison. With --rival-python, the interpreter of an environment that has PyPI's kvcached, it is
measured beside ours, round by round; rival.py says how that environment is made. Otherwise the figures that this
project's goals name stand beside ours.

Last result: docs/results/memory.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.memory.bench import GIB, LLAMA_8B, MIB, SMALL, mean_us, median_us, report, temporary_device
from prism import memory
from tests.memory.drivers import FakeCuda, build_fake

GOALS_US = {1: 3, 16: None, 256: 15, 1024: 50}
KVCACHED_US = {1: 37, 16: 38, 256: 63, 1024: 241}
KVCACHED_PAGE_US = 33
ROUNDS, REPEAT, RIVAL_REPEAT = 101, 100, 10
"""Many short rounds: one that was interrupted by another program does not move their median."""
NO_RESERVE = {
    "KVCACHED_MIN_RESERVED_PAGES": "0",
    "KVCACHED_MAX_RESERVED_PAGES": "0",
    "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
}
"""The rival keeps no spare pages, so that every page is mapped and unmapped."""
Rival = Callable[[int, int], float]
"""Mean microseconds of an alloc and free: (slots, repeat)."""


@contextmanager
def rival(python: str | None, slot_bytes: int, held: int, **environment: str) -> Iterator[Rival | None]:
    """PyPI's kvcached in a process of its own, with ``held`` slots in use; None without ``python``."""
    if python is None:
        yield None
        return
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        stub = Path(directory, "libcuda.so.1")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", stub, here / "rival_cuda.c"], check=True)
        process = subprocess.Popen(
            [python, here / "rival.py", str(slot_bytes), str(held)],
            env={**os.environ, "LD_PRELOAD": str(stub), "LD_LIBRARY_PATH": directory, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        ask, answer = process.stdin, process.stdout
        while (line := answer.readline()) != "ready\n":
            assert line, "the rival ended: is kvcached in its environment?"

        def measure(count: int, repeat: int) -> float:
            print(count, repeat, file=ask, flush=True)
            return float(answer.readline())

        try:
            yield measure
        finally:
            ask.close()
            process.wait()
            answer.close()


def note(ours_us: float, theirs_us: float, stated_us: float) -> str:
    """The rival's figure: measured if there is one (0 is none), else the stated one."""
    shown = theirs_us or stated_us
    return f"kvcached {shown:.1f} us {'here' if theirs_us else 'stated'} ({shown / ours_us:.0f}x)"


def slots(python: str | None) -> None:
    """Mapped pages only: the allocator itself."""
    with temporary_device(2 * GIB) as device, device.register("bench") as owner, ExitStack() as stack:
        other = stack.enter_context(rival(python, SMALL.cell_bytes, 100))
        pool = owner.arena(16 * GIB).divide(SMALL, 1_000_000, 64 * MIB)
        pool.free(pool.alloc(pool.available()))
        for count, goal in GOALS_US.items():
            ours, theirs = [], [0.0]
            for _ in range(ROUNDS):
                ours.append(mean_us(lambda count=count: pool.free(pool.alloc(count)), REPEAT))  # type: ignore[misc]
                if other is not None:
                    theirs.append(other(count, RIVAL_REPEAT))
            us, their_us = statistics.median(ours), statistics.median(theirs[1:] or theirs)
            words = note(us, their_us, KVCACHED_US[count])
            report(f"alloc+free of {count} slots", us, "us", words + (f"; goal <= {goal:g}" if goal else ""))


def page_on_fake_driver(library: Path, python: str | None) -> None:
    """Own code above the driver's calls: unmap; map, set access. The rival's: with a page, less without one."""
    fake = FakeCuda(library)
    fake.reset(2 * MIB, 8 * GIB)
    fake.set_noop(True)
    totals, without, calls, theirs = [], [], [], [0.0]
    with temporary_device(4 * GIB, library) as device, device.register("bench") as owner, ExitStack() as stack:
        other = stack.enter_context(rival(python, LLAMA_8B.cell_bytes, 14, **NO_RESERVE))
        driver_us = stack.enter_context(driver_calls(library))
        pool = owner.arena(64 * GIB).divide(LLAMA_8B, 100_000, 64 * MIB)
        pool.alloc(15)  # fills the block of the padding slot, so that what follows takes a page of its own
        for _ in range(ROUNDS):
            pool.set_ahead(0, 0)
            maps = pool.stats()["maps"]
            totals.append(mean_us(lambda: pool.free(pool.alloc(16)), REPEAT))
            assert pool.stats()["maps"] >= maps + REPEAT, "each round must map a page"
            pool.set_ahead(0, None)
            pool.free(pool.alloc(16))
            without.append(mean_us(lambda: pool.free(pool.alloc(16)), REPEAT))
            calls.append(driver_us())
            if other is not None:
                theirs.append(other(16, RIVAL_REPEAT) - other(1, RIVAL_REPEAT))
    own = statistics.median(t - w - c for t, w, c in zip(totals, without, calls, strict=True))
    report("slots and page: alloc+free of 16 slots, page out and in", statistics.median(totals), "us")
    report("  of that: slots alone", statistics.median(without), "us")
    report("  of that: three no-op driver calls", statistics.median(calls), "us")
    words = note(own, statistics.median(theirs[1:] or theirs), KVCACHED_PAGE_US)
    report("page out and in, own code", own, "us", words + "; goal <= 1.5")


@contextmanager
def driver_calls(library: Path) -> Iterator[Callable[[], float]]:
    """Measures cuMemUnmap, cuMemMap and cuMemSetAccess of the no-op driver, called in a loop in C: microseconds."""
    source = """
    #include <stddef.h>
    #include <time.h>
    int cuMemUnmap(unsigned long long, size_t); int cuMemSetAccess(unsigned long long, size_t, const void *, size_t);
    int cuMemMap(unsigned long long, size_t, size_t, unsigned long long, unsigned long long);
    double loop(int n) {
      struct timespec a, b;
      clock_gettime(CLOCK_MONOTONIC, &a);
      for (int i = 0; i < n; i++) { cuMemUnmap(0, 0); cuMemMap(0, 0, 0, 0, 0); cuMemSetAccess(0, 0, 0, 0); }
      clock_gettime(CLOCK_MONOTONIC, &b);
      return ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / n / 1e3;
    }
    """
    with tempfile.TemporaryDirectory() as directory:
        path, out = Path(directory, "loop.c"), Path(directory, "loop.so")
        path.write_text(source)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", out, path, library], check=True)
        loop = ctypes.CDLL(str(out)).loop
        loop.restype = ctypes.c_double
        yield lambda: float(loop(1000))


def churn(pool: memory.Pool) -> None:
    pool.free(pool.alloc(16))


def page_on_host() -> None:
    """The same with the kernel doing the work: how small the own part is where it is real."""
    with temporary_device(4 * GIB) as device, device.register("bench") as owner:
        pool = owner.arena(64 * GIB).divide(LLAMA_8B, 100_000, 64 * MIB)
        pool.set_ahead(0, 0)
        pool.alloc(15)
        report("host: page of 2 MiB out and in, pooled", median_us(lambda: churn(pool), 5, ROUNDS), "us")
    with (
        temporary_device(4 * GIB) as device,
        device.register("bench") as owner,
    ):  # no lease that would keep a spare page
        elastic = owner.arena(64 * GIB).divide(LLAMA_8B, 100_000)
        elastic.alloc(15)
        words = "host: page of 2 MiB given back and taken anew (zeroed)"
        report(words, median_us(lambda: churn(elastic), 2, ROUNDS), "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival-python", help="interpreter of an environment with PyPI's kvcached")
    python = parser.parse_args().rival_python
    slots(python)
    with tempfile.TemporaryDirectory() as directory:
        page_on_fake_driver(build_fake(Path(directory)), python)
    page_on_host()


if __name__ == "__main__":
    main()
