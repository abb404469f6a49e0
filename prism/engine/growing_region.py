"""A part of the device's account that grows tensor by tensor."""

from __future__ import annotations

from typing import Final

import torch

from prism import memory

ALIGN_BYTES: Final = 256
ROOM_WAIT_S: Final = 5.0
"""How long an activation waits for memory that the scheduler's books promise and that neighbours still hold: they feel
the wait as pressure and give up cached prefixes between two of their steps."""
_PAGE_BYTES: Final = 2 << 20
"""Pages of a region whose size is not known yet."""


class GrowingRegion:
    """Tensors one behind the other, charged as weights when they are made. ``virtual_bytes`` bounds them all; address
    space is taken with the first."""

    def __init__(self, owner: memory.Owner, virtual_bytes: int) -> None:
        self._owner, self._virtual_bytes = owner, virtual_bytes
        self._region: memory.WeightRegion | None = None
        self._used_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Physical bytes behind it now."""
        return 0 if self._region is None else int(self._region.committed_bytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """The next tensor, as flat bytes of undefined content. Raises ``prism.memory.OutOfMemory``."""
        if self._region is None:
            self._region = self._owner.weight_region(self._virtual_bytes, page_bytes=_PAGE_BYTES)
        start = -(-self._used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self._region.commit(offset_bytes=start, nbytes=nbytes, timeout_s=ROOM_WAIT_S)
        self._used_bytes = start + nbytes
        return self._region.tensor(start, (nbytes,), torch.uint8)

    def close(self) -> None:
        """Give the memory back. No tensor in it may be used any more."""
        if self._region is not None:
            self._region.close()
            self._region = None
