"""Sequences as SGLang's radix tree and requests hold them: all tokens from the first on, and the slot of each."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import Any

import torch

from prism.memory.rows import RowNumbers


def evicted_paths(tree: Any, count: int) -> Iterator[tuple[Any, RowNumbers, str | None, int]]:
    """What ``tree.evict`` will drop for ``count`` tokens, as whole paths: (tokens, their slots, adapter, first token
    that goes). A node that goes after its children is part of their paths."""
    priority = tree.eviction_strategy.get_priority
    heap = [(priority(node), node) for node in tree.evictable_leaves]
    heapq.heapify(heap)
    gone: list[Any] = []
    left: dict[Any, int] = {}
    while count > 0 and heap:
        _, node = heapq.heappop(heap)
        gone.append(node)
        count -= len(node.value)
        parent = node.parent
        left[parent] = left.get(parent, len(parent.children)) - 1
        if left[parent] == 0 and parent.lock_ref == 0:
            heapq.heappush(heap, (priority(parent), parent))
    going = set(gone)
    for node in gone:
        if not node.children:
            tokens, slots = path_of(node)
            first = len(tokens) - sum(len(n.key) for n in _upward(node, going))
            yield tokens, slots, node.key.extra_key, first


def _upward(node: Any, within: set[Any]) -> Iterator[Any]:
    while node in within:
        yield node
        node = node.parent


def path_of(node: Any) -> tuple[array[int], RowNumbers]:
    """All tokens from the root to the end of ``node``, and their slots."""
    parts = []
    while node.parent is not None:
        parts.append(node)
        node = node.parent
    tokens: array[int] = array("q")
    for part in reversed(parts):
        tokens += part.key.raw_token_ids()
    slots = torch.cat([slots_of(part) for part in reversed(parts)]) if parts else torch.empty(0, dtype=torch.int64)
    return tokens, slots.cpu().numpy()


def slots_of(node: Any) -> torch.Tensor:
    """Of the tokens of a node of the tree: where it has several components those of the first."""
    slots: torch.Tensor = node.component_data[0].value if hasattr(node, "component_data") else node.value
    return slots


def request_path(req: Any, req_to_token_pool: Any) -> tuple[array[int], RowNumbers]:
    """Tokens of ``req`` whose KV is computed, and their slots."""
    tokens = req.origin_input_ids + req.output_ids
    count = min(len(tokens), int(req.effective_kv_committed_len()))
    slots = req_to_token_pool.req_to_token[req.req_pool_idx, :count]
    return tokens[:count], slots.to(torch.int64).cpu().numpy()


def nodes_below(node: Any) -> Iterator[Any]:
    """All nodes of the tree under ``node``."""
    for child in node.children.values():
        yield child
        yield from nodes_below(child)
