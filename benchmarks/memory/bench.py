"""What the memory benchmarks share: devices in a temporary directory, repeated timing, and how a line is printed."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prism import memory

GIB, MIB = 1 << 30, 1 << 20
LLAMA_8B = memory.KvLayout(layers=32, kv_heads=8, head_dim=128)
"""16 tokens of 128 KiB a page of 2 MiB."""
SMALL = memory.KvLayout(layers=8, kv_heads=2, head_dim=64)
"""512 tokens of 4 KiB a page: many slots without much memory."""


@contextmanager
def temporary_device(
    capacity_bytes: int, cuda_library: Path | None = None, page_bytes: int = 2 * MIB
) -> Iterator[memory.Device]:
    """A host device (or a CUDA device on the given driver library) with an account of its own."""
    with tempfile.TemporaryDirectory() as directory:
        name = "host:0" if cuda_library is None else "cuda:0"
        library = None if cuda_library is None else str(cuda_library)
        yield memory.open_device(
            name, capacity_bytes, account_dir=directory, page_bytes=page_bytes, cuda_library=library
        )


def mean_us(action: Callable[[], object], repeat: int) -> float:
    """Mean time of ``repeat`` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        action()
    return (time.perf_counter() - start) / repeat * 1e6


def median_us(action: Callable[[], object], repeat: int, rounds: int = 7) -> float:
    """Median over rounds of the mean time of ``repeat`` calls."""
    return statistics.median(mean_us(action, repeat) for _ in range(rounds))


def report(what: str, value: float, unit: str, goal: str = "") -> None:
    """One line of results."""
    print(f"{what:<58} {value:>12.3f} {unit:<8} {goal}")
