"""k sources at once (lambda-Scale 4.2, Algorithm 1) and the pipelines that run while blocks arrive (Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np

from prism.policy.multicast.schedule import Schedule, build

_MORE: Final = 2
"""Blocks behind a chunk that begins with a layer: the last one of the chunk ends there, as far as is known."""


def transfer_orders(sources: int, blocks: int) -> list[list[int]]:
    """Algorithm 1: the blocks are cut into ``sources`` chunks of ceil(blocks / sources); sub-group i sends chunk i
    first, then i+1, ... cyclically. After about blocks / sources steps the groups together hold the model."""
    size = -(-blocks // sources)
    chunks = [list(range(size * i, min(size * (i + 1), blocks))) for i in range(sources)]
    return [[b for j in range(sources) for b in chunks[(i + j) % sources]] for i in range(sources)]


def orders_from(starts: Sequence[int], blocks: int) -> list[list[int]]:
    """The same with chunks that begin at ``starts``, of any size."""
    return [[(start + i) % blocks for i in range(blocks)] for start in starts]


def block_orders(
    groups: int,
    blocks: int,
    shift: bool = True,
    first: Sequence[int] = (),
    starts: Sequence[int] = (),
    ends: Collection[int] = (),
) -> list[list[int]]:
    """The order of the blocks in each sub-group: its own (``shift``) or the same for all, in any case behind the blocks
    ``first``. ``starts``: the block with which each begins behind these, where chunks are not of equal size. ``ends``:
    of the blocks ``first``, those that all sub-groups with an order of their own but the first get behind their own
    chunk only."""
    rest = [block for block in range(blocks) if block not in first]
    shifted = transfer_orders(groups, len(rest)) if shift else [list(range(len(rest)))] * groups
    if starts:
        shifted = orders_from([rest.index(block) for block in starts], len(rest))
    orders = [[rest[i] for i in order] for order in shifted]
    if not shift or not ends or not rest or groups == 1:
        return [[*first, *order] for order in orders]
    found = [[*first, *orders[0]]]
    for order, following in zip(orders[1:], [*orders[2:], orders[0]], strict=True):
        own = order.index(following[0]) + (_MORE if starts else 0)
        later = [block for block in first if block in ends]
        found.append([*(block for block in first if block not in ends), *order[:own], *later, *order[own:]])
    return found


def sub_groups(nodes: int, sources: int) -> list[list[int]]:
    """Nodes dealt to sub-groups of nearly equal size: group i is source i followed by its receivers, in node order.
    Raises ``ValueError`` unless 1 <= sources < nodes."""
    if not 1 <= sources < nodes:
        raise ValueError(f"a multicast to {nodes} nodes needs 1..{nodes - 1} sources, got {sources}")
    base, extra = divmod(nodes - sources, sources)
    groups: list[list[int]] = []
    start = sources
    for i in range(sources):
        size = base + (1 if i < extra else 0)
        groups.append([i, *range(start, start + size)])
        start += size
    return groups


def k_way(
    one_source: Callable[[int, int], Schedule],
    nodes: int,
    sources: int,
    blocks: int,
    shift: bool = True,
    first: Sequence[int] = (),
    starts: Sequence[int] = (),
    ends: Collection[int] = (),
) -> Schedule:
    """Nodes 0..sources-1 send to all others: each sub-group runs ``one_source`` by itself, with the blocks in its own
    order or all in the same one (:func:`block_orders`). A sub-group without receivers is idle."""
    orders = block_orders(sources, blocks, shift, first, starts, ends)
    parts: list[Schedule] = []
    name = ""
    for members, order in zip(sub_groups(nodes, sources), orders, strict=True):
        if len(members) < 2:
            continue
        part = one_source(len(members), blocks)
        name = part.algorithm
        node = np.array(members, dtype=np.int32)
        relabel = np.array(order, dtype=np.int32)
        parts.append(
            Schedule(name, nodes, sources, blocks, part.step, node[part.src], node[part.dst], relabel[part.block])
        )
    columns = [np.concatenate([getattr(p, field) for p in parts]) for field in ("step", "src", "dst", "block")]
    return build(name, nodes, sources, blocks, *columns)


def pipelines(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Algorithm 2: execution pipelines over the receivers of the sub-groups (sources left out by the caller).

    While several sub-groups have unassigned nodes, the t-th of each form one pipeline; when one sub-group remains,
    its nodes in order form the last.
    """
    left = [list(g) for g in groups if g]
    made: list[list[int]] = []
    while left:
        if len(left) == 1:
            made.append(left[0])
            break
        rounds = min(len(g) for g in left)
        made += [[g[t] for g in left] for t in range(rounds)]
        left = [g[rounds:] for g in left if len(g) > rounds]
    return made
