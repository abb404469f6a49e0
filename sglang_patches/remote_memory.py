"""The KV that an engine keeps for another one's requests: memory of its own in the account, given back as a whole.

::

    slot s of the leader        at s * slot_bytes: K and V of the layers that are run for it, layer by layer
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
        item = own.store_dtype.itemsize
        sizes = own.head_num * own.head_dim, own.head_num * own.v_head_dim
        self._slot_bytes = (end - first) * sum(sizes) * item
        nbytes = slots * self._slot_bytes
        if not 0 < nbytes <= _MOST_BYTES:
            raise BadMessage(f"KV of {slots} slots would be {nbytes} bytes")
        self._region = owner.lent_region(-(-nbytes // owner.page_bytes) * owner.page_bytes)
        self._page_bytes = self._region.page_bytes
        self._mapped = np.zeros(self._region.nbytes // self._page_bytes, dtype=np.bool_)
        flat = torch.from_dlpack(self._region.memory()).view(own.store_dtype)
        self.pool = _with_buffers(own, flat, first, end, slots)
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

    def read(self, first: int, end: int, slots: list[int]) -> tuple[Any, Any]:
        """K and V of layers [first, end): ``[layers, slots, heads, dim]``."""
        index = torch.tensor(slots, dtype=torch.int64)
        chosen = slice(first - self.first, end - self.first)
        return _rows(self.pool.k_buffer[chosen], index), _rows(self.pool.v_buffer[chosen], index)

    def write(self, first: int, slots: list[int], k: Any, v: Any) -> None:
        """K and V of layers [first, first + len(k)), as :meth:`read` has them."""
        index = torch.tensor(slots, dtype=torch.int64)
        for layer, (k_rows, v_rows) in enumerate(zip(k, v, strict=True), first - self.first):
            self.pool.k_buffer[layer][index] = k_rows
            self.pool.v_buffer[layer][index] = v_rows

    def rows_like(self, layers: int, tokens: int) -> list[tuple[Any, tuple[int, ...]]]:
        """Type and shape of K and of V as :meth:`write` takes them."""
        return [(one.dtype, (layers, tokens, *one.shape[1:])) for one in (self.pool.k_buffer[0], self.pool.v_buffer[0])]

    def close(self) -> None:
        """Give everything back. Nothing here may be used any more."""
        self.pool = self.rows = self.backend = None
        self._region.close()
        self._owner.close()


def _rows(buffers: Sequence[Any], index: Any) -> Any:
    """The rows of each buffer, copied once: ``[buffers, rows, heads, dim]``."""
    found = buffers[0].new_empty((len(buffers), len(index), *buffers[0].shape[1:]))
    index = index.to(found.device)
    for rows, buffer in zip(found, buffers, strict=True):
        torch.index_select(buffer, 0, index, out=rows)
    return found


def _with_buffers(own: Any, flat: Any, first: int, end: int, slots: int) -> Any:
    """SGLang's pool as it is, over other buffers."""
    pool = copy.copy(own)
    heads, dims = own.head_num, (own.head_dim, own.v_head_dim)
    k, v = heads * dims[0], heads * dims[1]
    row = (end - first) * (k + v)
    pool.k_buffer = [
        flat.as_strided((slots, heads, dims[0]), (row, dims[0], 1), layer * (k + v)) for layer in range(end - first)
    ]
    pool.v_buffer = [
        flat.as_strided((slots, heads, dims[1]), (row, dims[1], 1), layer * (k + v) + k) for layer in range(end - first)
    ]
    pool.start_layer, pool.end_layer, pool.layer_num = first, end - 1, end - first
    pool.size = slots - own.page_size
    return pool
