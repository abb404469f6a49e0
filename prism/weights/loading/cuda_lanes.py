"""The lane of :mod:`prism.weights.loading.gpu_loader` on a real GPU, through CuPy. Imported only where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prism.weights.loading.gpu_loader import CHUNK_BYTES


class CudaLane:
    """Host memory to GPU ``gpu`` over its own link. Close it after use."""

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

    def close(self) -> None:
        self._stream.synchronize()
        self._pinned.clear()
