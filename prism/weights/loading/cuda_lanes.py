"""The lanes of :mod:`prism.weights.loading.gpu_loader` on real GPUs, through CuPy. Imported only where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prism.weights.loading.gpu_loader import CHUNK_BYTES, Lane


def open_lanes(target: int, helpers: Sequence[int] = (), busy: Callable[[int], bool] = lambda gpu: False) -> list[Lane]:
    """Lanes into GPU ``target``: its own, and one over each of ``helpers`` (GPU indices) that can reach it directly.
    ``busy(gpu)`` throttles a helper that serves requests. Close them after use."""
    import cupy

    direct = cupy.cuda.runtime.deviceCanAccessPeer
    useful = [gpu for gpu in helpers if gpu != target and direct(target, gpu)]
    return [CudaLane(target), *(HelperLane(gpu, target, busy) for gpu in useful)]


class CudaLane:
    """Host memory to the target over its own link."""

    def __init__(self, gpu: int) -> None:
        import cupy

        self._cuda: Any = cupy.cuda
        self._gpu = gpu
        with self._cuda.Device(gpu):
            self._stream = self._cuda.Stream(non_blocking=True)
            self._pinned = [self._cuda.alloc_pinned_memory(CHUNK_BYTES) for _ in range(2)]
            self._events = [self._cuda.Event(disable_timing=True) for _ in range(2)]
        self.buffers: Sequence[int] = [memory.ptr for memory in self._pinned]

    def busy(self) -> bool:
        return False

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


class HelperLane(CudaLane):
    """Host memory to a helper GPU over the helper's link, and on to the target over the direct link between the two."""

    def __init__(self, helper: int, target: int, busy: Callable[[int], bool]) -> None:
        super().__init__(helper)
        self._target_gpu, self._busy = target, busy
        with self._cuda.Device(helper):
            self._staging = self._cuda.alloc(CHUNK_BYTES)

    def busy(self) -> bool:
        return self._busy(self._gpu)

    def send(self, buffer: int, target: int, nbytes: int) -> None:
        # one stream: the second chunk enters the staging buffer only when the first has left it
        runtime = self._cuda.runtime
        staging = self._staging.ptr
        with self._cuda.Device(self._gpu):
            runtime.memcpyAsync(staging, self.buffers[buffer], nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
            runtime.memcpyPeerAsync(target, self._target_gpu, staging, self._gpu, nbytes, self._stream.ptr)
            self._events[buffer].record(self._stream)

    def close(self) -> None:
        super().close()
        self._staging = None
