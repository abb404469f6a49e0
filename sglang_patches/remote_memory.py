"""The KV that an engine keeps for another one's requests: memory of its own in the account, given back as a whole.

::

    slot s of the leader        at s * slot_bytes: its rows of the layers that are run for it, layer by layer
    pages                       come with the first token that is written to them, as *lent* memory, which the device's
                                own engines want back before anything else; there are as many as the device lends
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from prism import memory
from sglang_patches.remote_check import BadMessage
from sglang_patches.remote_rows import RowShape, foreign_pool, read_rows, write_rows

_MOST_BYTES = 1 << 40
"""Address space for one leader."""


class ForeignKv:
    """KV of layers [first, end) for ``slots`` slots of a leader, with the request table and the attention back end that
    its batches run with: nothing of the engine's own batches is touched. Raises :class:`BadMessage` for a leader that
    has absurdly many slots."""

    def __init__(self, runner: Any, owner: memory.Owner, first: int, end: int, slots: int) -> None:
        own = runner.token_to_kv_pool
        self.first, self.end, self.slots = first, end, slots
        self._owner = owner
        self._shape = RowShape.of(own)
        self._slot_bytes = (end - first) * self._shape.nbytes
        nbytes = slots * self._slot_bytes
        if not 0 < nbytes <= _MOST_BYTES:
            raise BadMessage(f"KV of {slots} slots would be {nbytes} bytes")
        self._region = owner.lent_region(-(-nbytes // owner.page_bytes) * owner.page_bytes)
        self._page_bytes = self._region.page_bytes
        self._mapped = np.zeros(self._region.nbytes // self._page_bytes, dtype=np.bool_)
        flat = torch.from_dlpack(self._region.memory()).view(self._shape.dtype)
        self.pool = foreign_pool(own, flat, range(first, end), slots)
        rows = runner.req_to_token_pool
        self.rows = copy.copy(rows)
        self.rows.req_to_token = torch.zeros_like(rows.req_to_token)
        view = copy.copy(runner)
        view.token_to_kv_pool, view.req_to_token_pool = self.pool, self.rows
        self.backend = type(runner.attn_backend)(view)

    @property
    def held_bytes(self) -> int:
        return int(self._region.committed_bytes)

    @property
    def wanted_back(self) -> bool:
        """Somebody of this device needs the memory."""
        return self.held_bytes > 0 and self._owner.pressure() > 0

    def _pages(self, slots: Any) -> Any:
        first = np.asarray(slots, dtype=np.int64) * self._slot_bytes
        return np.unique(
            np.concatenate([first // self._page_bytes, (first + self._slot_bytes - 1) // self._page_bytes])
        )

    def back(self, slots: list[int]) -> None:
        """Memory behind ``slots``. Raises ``prism.memory.OutOfMemory``; what was mapped until then stays."""
        pages = self._pages(slots)
        for page in pages[~self._mapped[pages]].tolist():
            self._region.commit(self._page_bytes, offset_bytes=page * self._page_bytes)
            self._mapped[page] = True

    def has(self, slots: list[int]) -> bool:
        """Whether there is memory behind all of ``slots``: others must not be read."""
        return bool(self._mapped[self._pages(slots)].all()) if slots else True

    def read(self, first: int, end: int, slots: list[int]) -> list[torch.Tensor]:
        """The parts of layers [first, end) (:mod:`sglang_patches.remote_rows`): ``[layers, slots, heads, dim]``."""
        return read_rows(self.pool, range(first - self.first, end - self.first), _index(slots))

    def write(self, first: int, slots: list[int], parts: Sequence[Any]) -> None:
        """The parts of some layers, from ``first`` on, as :meth:`read` has them."""
        begin = first - self.first
        write_rows(self.pool, range(begin, begin + len(parts[0])), _index(slots), parts)

    def rows_like(self, layers: int, tokens: int) -> list[tuple[Any, tuple[int, ...]]]:
        """Type and shape of each part as :meth:`write` takes them."""
        return [(self._shape.dtype, shape) for shape in self._shape.shapes(layers, tokens)]

    def close(self) -> None:
        """Give everything back. Nothing here may be used any more."""
        self.pool = self.rows = self.backend = None
        self._region.close()
        self._owner.close()


def _index(slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)
