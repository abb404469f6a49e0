"""The interface of the paper's Table 3 (Prism 5.1), over arenas and pools."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prism.memory._kvcached import Pool
from prism.memory.layout import KvLayout
from prism.memory.owner import Owner

# Layouts and page rounding may make a pool somewhat longer than its tokens.
_ROOM = 2


def alloc_kvcache(owner: Owner, layout: KvLayout, max_tokens: int, page_bytes: int = 2 << 20) -> Pool:
    """Create an elastic KV cache: address space for ``max_tokens``, and one block of memory for the padding slot."""
    slack_bytes = 2 * layout.layers * page_bytes * layout.page_multiple
    return owner.arena(max_tokens * layout.cell_bytes * _ROOM + slack_bytes + layout.cell_bytes).divide(
        layout, max_tokens
    )


def free_kvcache(pool: Pool) -> None:
    """Destroy the cache: all memory goes back to the account; its slots and tensors are void."""
    pool.close()


def alloc_kv(pool: Pool, tokens: int) -> npt.NDArray[np.int64]:
    """Slots for ``tokens`` tokens, mapping pages as needed, or ``OutOfMemory`` and no change."""
    return pool.alloc(tokens)


def free_kv(pool: Pool, slots: npt.NDArray[np.int64]) -> None:
    """Give slots back; pages that ran empty return to the account."""
    pool.free(slots)
