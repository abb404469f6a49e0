"""Weight regions: addresses that stay while the memory behind them comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prism.memory import _kvcached
from prism.memory.errors import BadRequest

if TYPE_CHECKING:
    import torch

GPU_REGION_PAGE_BYTES = 32 << 20
"""Weights come and go as a whole, so their physical pages are large: fewer driver calls."""


class WeightRegion:
    """Weights of one model. Pointers into it, and CUDA graphs that captured them, stay valid over decommit and commit.

    The content does not survive ``decommit()``; load it again after ``commit()``.
    """

    def __init__(self, core: _kvcached.CoreWeightRegion) -> None:
        self._core = core

    @property
    def address(self) -> int:
        """Start of the range; never changes."""
        return self._core.address

    @property
    def nbytes(self) -> int:
        """Length of the range."""
        return self._core.bytes

    @property
    def page_bytes(self) -> int:
        """Size of the physical pages; commits and decommits happen in these."""
        return self._core.page_bytes

    @property
    def committed_bytes(self) -> int:
        """Memory behind the range now, charged to the owner as weights."""
        return self._core.committed_bytes

    def commit(self, nbytes: int | None = None, *, offset_bytes: int = 0, timeout_s: float = 0.0) -> int:
        """Put memory behind every page touched by the range that has none; all or nothing. Returns the bytes added.

        Raises ``OutOfMemory`` (when the other owners, who feel pressure meanwhile, have not given way within
        ``timeout_s``) or ``LimitExceeded``. What new memory contains is undefined.
        """
        return self._core.commit(offset_bytes, self.nbytes - offset_bytes if nbytes is None else nbytes, timeout_s)

    def decommit(self, nbytes: int | None = None, *, offset_bytes: int = 0) -> int:
        """Take away every page wholly inside, which nothing in flight may touch. Returns the bytes freed."""
        return self._core.decommit(offset_bytes, self.nbytes - offset_bytes if nbytes is None else nbytes)

    def memory(self) -> object:
        """The range as an object with ``__dlpack__`` (uint8, one dimension)."""
        return self._core.memory()

    def tensor(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zero-copy torch tensor; valid to touch while its pages are committed."""
        return torch_tensor(self.memory(), self.nbytes, offset_bytes, shape, dtype)

    def export_pages(self) -> list[tuple[int, int, int]]:
        """``(descriptor, offset_bytes, bytes)`` of every page of an exportable region, to send to another process; the
        caller closes them."""
        return self._core.export_pages()

    def close(self) -> None:
        """Decommit, for good. The addresses are given back when no tensor refers to them any more."""
        self._core.close()


class ImportedRegion:
    """Another process's weight region, mapped here and charged there."""

    def __init__(self, core: _kvcached.CoreImportedRegion) -> None:
        self._core = core

    @property
    def address(self) -> int:
        """Start of the range."""
        return self._core.address

    @property
    def nbytes(self) -> int:
        """Length of the range, whole pages."""
        return self._core.bytes

    def memory(self) -> object:
        """The range as an object with ``__dlpack__`` (uint8, one dimension)."""
        return self._core.memory()

    def tensor(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zero-copy torch tensor of the other process's memory."""
        return torch_tensor(self.memory(), self.nbytes, offset_bytes, shape, dtype)

    def close(self) -> None:
        """Unmap; the exporter's memory is not touched."""
        self._core.close()


def torch_tensor(
    memory: object, nbytes: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """View a part of ``memory`` as a contiguous tensor; ``BadRequest`` if it lies outside or is not aligned."""
    import torch

    elements = 1
    for length in shape:
        elements *= length
    size_bytes = elements * dtype.itemsize
    if offset_bytes < 0 or size_bytes > nbytes - offset_bytes or offset_bytes % dtype.itemsize:
        numbers = {"offset_bytes": offset_bytes, "tensor_bytes": size_bytes, "region_bytes": nbytes}
        raise BadRequest("the tensor lies outside the region or is not aligned", numbers)
    raw = torch.from_dlpack(memory)
    return raw[offset_bytes : offset_bytes + size_bytes].view(dtype).view(tuple(shape))
