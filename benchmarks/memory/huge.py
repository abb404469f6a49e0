"""What do huge pages gain and cost where memory is a file, as a virtual device's and a copy of weights are?

    python -m benchmarks.memory.huge

Three ways to have memory behind a file take turns: small pages (``fallocate``), huge ones a call for each 2 MiB, and
huge ones in one call for all (``prism.memory.make_huge``). Shown for each: the rate of making it, the rate of the first
write through a mapping (which finds and translates the pages), and the time to give 2 MiB back. A virtual machine whose
host gives it memory as it is touched pays for that in whichever way comes first: the median of rounds leaves it out.

Last result: docs/results/memory.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from benchmarks.memory.bench import GIB, MIB, report
from prism import memory

HUGE = 2 * MIB
ROUNDS = 9


def main() -> None:
    ways: dict[str, Callable[[int], None]] = {
        "small pages": lambda file: os.posix_fallocate(file, 0, GIB),
        "huge pages, one a call": lambda file: make(file, HUGE),
        "huge pages, all in one call": lambda file: make(file, GIB),
    }
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for way, action in ways.items():
            file = os.memfd_create("bench")
            os.truncate(file, GIB)
            start = time.perf_counter()
            action(file)
            found[way, "make"].append(1 / (time.perf_counter() - start))  # of one GiB
            with mmap.mmap(file, GIB) as mapped:
                address = ctypes.addressof(kept := ctypes.c_char.from_buffer(mapped))
                start = time.perf_counter()
                ctypes.memset(address, 1, GIB)
                found[way, "first write"].append(1 / (time.perf_counter() - start))
                del kept
            start = time.perf_counter()
            os.close(file)
            found[way, "given back"].append((time.perf_counter() - start) * HUGE / GIB * 1e6)
    for (way, what), values in found.items():
        unit = "us for 2 MiB" if what == "given back" else "GiB/s"
        report(f"{way}: {what}", statistics.median(values), unit)


def make(file: int, together: int) -> None:
    for first in range(0, GIB, together):
        if not memory.make_huge(file, first, first + together):
            raise SystemExit("This kernel gives no huge pages to files in memory (Linux 6.1 and later do).")


if __name__ == "__main__":
    main()
