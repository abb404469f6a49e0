"""Which state of Mamba or linear attention belongs to a point of a sequence whose KV moves.

SGLang keeps one for each running request, behind all that it has computed, and one for each node of its tree that
ends where a request did. What moves is found by slots of tokens (:mod:`sglang_patches.kv_move_trees`), and from those
nothing leads to states: while a sequence is stored or brought it stands here which state is behind its last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from sglang.srt.mem_cache.unified_cache_components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from prism.memory.rows import RowNumbers

STATES: Final = (ComponentType.FULL, ComponentType.MAMBA)


def has_states(tree: Any) -> bool:
    return type(tree) is UnifiedRadixCache and tuple(tree.tree_components) == STATES


def state_of(node: Any) -> torch.Tensor | None:
    """The slot, as a tensor of one, of the state behind the last token of a node; None: it has none."""
    found: torch.Tensor | None = node.component_data[ComponentType.MAMBA].value
    return found


def running_state(tree: Any, req: Any) -> torch.Tensor | None:
    """The same of a request, behind all tokens that are computed; None: there is none, or the step in flight writes
    it already (SGLang's extra buffers, which it has where steps overlap)."""
    if not has_states(tree) or req.mamba_pool_idx is None:
        return None
    if tree.components[ComponentType.MAMBA].enable_mamba_extra_buffer:
        return None
    found: torch.Tensor = req.mamba_pool_idx.view(1)
    return found


@contextmanager
def known_state(tree: Any, slots: RowNumbers, state: torch.Tensor | None) -> Iterator[None]:
    """Within, ``state`` belongs to the point behind the sequence whose tokens are in ``slots``."""
    if state is None or not len(slots):
        yield
        return
    known = states_behind(tree)
    last = int(slots[-1])
    known[last] = int(state[0])
    try:
        yield
    finally:
        del known[last]


def states_behind(tree: Any) -> dict[int, int]:
    """Slots of states by the slot of the token that they are behind, of those that move now."""
    if not hasattr(tree, "prism_states"):
        tree.prism_states = {}
    found: dict[int, int] = tree.prism_states
    return found
