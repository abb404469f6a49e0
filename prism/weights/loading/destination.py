"""What a load may copy into: memory of this process, by its address."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

import numpy as np

from prism.weights.packs.writer import ReadableBuffer

_DLPACK_CUDA: Final = 2


@runtime_checkable
class Addressed(Protocol):
    """Memory known by its address, such as a region of :mod:`prism.memory`."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


Destination = Addressed | ReadableBuffer


def address_of(memory: Destination) -> tuple[int, int]:
    """Address and size in bytes of ``memory``; a buffer must be writable (``ValueError``) and outlive the use."""
    if isinstance(memory, Addressed):
        return memory.address, memory.nbytes
    view = memoryview(memory).cast("B")
    if view.readonly:
        raise ValueError("the destination of a load is read-only")
    array = np.frombuffer(view, dtype=np.uint8)
    return int(array.ctypes.data), array.nbytes


def gpu_of(memory: object) -> int | None:
    """Index of the GPU that ``memory`` (a region of :mod:`prism.memory`) is on; None for host memory."""
    tensor = getattr(memory, "memory", None)
    if tensor is None or not callable(tensor):
        return None
    kind, index = tensor().__dlpack_device__()
    return int(index) if kind == _DLPACK_CUDA else None
