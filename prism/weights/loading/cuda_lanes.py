"""The lanes of :mod:`prism.weights.loading.gpu_loader` on a real GPU, through CuPy. Imported only where there is one.

Importing CuPy and pinning memory take longer than a small model's load, so a process opens its lanes once, best while
it has nothing else to do (:func:`warm_lanes`), and keeps them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from prism.weights.loading.gpu_loader import CHUNK_BYTES

LANES: Final = max(2, min(6, (os.cpu_count() or 2) // 2))
"""Threads that fill pinned buffers: one copies some 10 GB/s, a PCIe 5 link takes 55."""


class CudaLane:
    """Host memory to GPU ``gpu`` over its own link."""

    def __init__(self, gpu: int) -> None:
        import cupy

        self._cuda: Any = cupy.cuda
        self._gpu = gpu
        with self._cuda.Device(gpu):
            self._stream = self._cuda.Stream(non_blocking=True)
            self._pinned = [self._cuda.alloc_pinned_memory(CHUNK_BYTES) for _ in range(2)]
            self._events = [self._cuda.Event(disable_timing=True) for _ in range(2)]
        self.buffers: Sequence[int] = [memory.ptr for memory in self._pinned]

    def send(self, buffer: int, target: int, nbytes: int) -> None:
        runtime = self._cuda.runtime
        with self._cuda.Device(self._gpu):
            runtime.memcpyAsync(target, self.buffers[buffer], nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
            self._events[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        self._events[buffer].synchronize()

    def settle(self) -> None:
        """Returns when nothing is on its way, however the load ended: the buffers may be filled again."""
        self._stream.synchronize()


class CudaPeer:
    """Memory of another GPU, mapped here, to GPU ``gpu``, whose driver reads it over the link between the two."""

    def __init__(self, gpu: int) -> None:
        import cupy

        self._cuda: Any = cupy.cuda
        self._gpu = gpu
        with self._cuda.Device(gpu):
            self._stream = self._cuda.Stream(non_blocking=True)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Returns when the bytes are there."""
        runtime = self._cuda.runtime
        with self._cuda.Device(self._gpu):
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, self._stream.ptr)
            self._stream.synchronize()


_OPEN: Final[dict[int, list[CudaLane]]] = {}


def warm_lanes(gpu: int, count: int = LANES) -> Sequence[CudaLane]:
    """This process's lanes to the GPU, opened when they are first asked for. One load at a time uses them."""
    lanes = _OPEN.setdefault(gpu, [])
    while len(lanes) < count:
        lanes.append(CudaLane(gpu))
    return lanes[:count]


def finish_other_work(gpu: int) -> None:
    """Returns when the GPU has done what this process gave it. Lanes have streams of their own, which do not wait for
    what another library still writes into the target (a model's parameters are initialised by torch)."""
    import cupy

    cupy.cuda.Device(gpu).synchronize()
