"""A part of the device's account that grows tensor by tensor, and shrinks by the pages in which none is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from prism import memory

ALIGN_BYTES: Final = 256
ROOM_WAIT_S: Final = 5.0
"""How long an activation waits for memory that the scheduler's books promise and that neighbours still hold: they feel
the wait as pressure and give up cached prefixes between two of their steps."""
_PAGE_BYTES: Final = 2 << 20
"""Pages of a region whose size is not known yet."""


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    end: int
    storage: StorageWeakRef


class GrowingRegion:
    """Tensors one behind the other, charged as weights when they are made. ``virtual_bytes`` bounds them all; address
    space is taken with the first."""

    def __init__(self, owner: memory.Owner, virtual_bytes: int) -> None:
        self._owner, self._virtual_bytes = owner, virtual_bytes
        self._region: memory.WeightRegion | None = None
        self._pieces: list[_Piece] = []
        self._used_bytes = 0
        self._device = ""

    @property
    def held_bytes(self) -> int:
        """Physical bytes behind it now."""
        return 0 if self._region is None else int(self._region.committed_bytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """The next tensor, as flat bytes of undefined content in a storage of its own. Raises
        ``prism.memory.OutOfMemory``."""
        if self._region is None:
            self._region = self._owner.weight_region(self._virtual_bytes, page_bytes=_PAGE_BYTES)
        start = -(-self._used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._region.commit(offset_bytes=start, nbytes=nbytes, timeout_s=ROOM_WAIT_S)
        self._used_bytes = start + nbytes
        flat = self._region.tensor(start, (nbytes,), torch.uint8)
        self._device = flat.device.type
        self._pieces.append(_Piece(start, self._used_bytes, StorageWeakRef(flat.untyped_storage())))
        return flat

    def addresses(self) -> list[int | None]:
        """Of all tensors ever made, in their order; None for one that nobody refers to any more."""
        base = 0 if self._region is None else self._region.address
        return [None if piece.storage.expired() else base + piece.start for piece in self._pieces]

    def lacks(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of the region's device and its first element lies elsewhere."""
        if self._region is None:
            return True
        inside = 0 <= tensor.data_ptr() - self._region.address < self._used_bytes
        return not inside and tensor.device.type == self._device

    def trim(self) -> int:
        """Gives back pages in which no tensor is left that anybody refers to. Returns the bytes freed."""
        freed_bytes, end = 0, 0
        for piece in self._pieces:
            if not piece.storage.expired():
                freed_bytes += self._give_back(end, piece.start)
                end = piece.end
        return freed_bytes + self._give_back(end, self._used_bytes)

    def _give_back(self, start: int, end: int) -> int:
        if self._region is None or end - start < self._region.page_bytes:
            return 0
        return self._region.decommit(offset_bytes=start, nbytes=end - start)

    def close(self) -> None:
        """Give the memory back. No tensor in it may be used any more."""
        self._pieces.clear()
        if self._region is not None:
            self._region.close()
            self._region = None
