"""Who sends which block when along chains of groups (BlitzScale 5.1): sharded between groups, gathered inside them.

::

    step         0       1       2       3           hop (a b) -> (c d): two shards, block j over shard j mod 2
    a -> c       0       2       4                   gather: c passes 0, 2, ... to d, d passes 1, 3, ... to c,
    b -> d       1       3       5                   over the group's own links, while the next ones come
    c <-> d              0 1     2 3     4 5

What a device passes on to the next group it has from its own shard, or by the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prism.policy.multicast.schedule import Ints, Schedule

Groups = Sequence[Sequence[int]]
"""One chain: the source group and its target groups in order, each the numbers of its nodes."""


def chain_schedule(chains: Sequence[Groups], nodes: int, sources: int, orders: Sequence[Sequence[int]]) -> Schedule:
    """``orders[i]``: every block once, as the i-th chain sends them. No node is in two chains. In one step a node sends
    one block at most to, and gets one from, another group; what goes round in a group comes beside it."""
    parts = [_one_chain(groups, order) for groups, order in zip(chains, orders, strict=True)]
    step, src, dst, block, gather = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    # what is gathered is there already: it does not wait behind what only begins to come
    key = np.lexsort((src, ~gather.astype(np.bool_), step))
    columns = (column[key].astype(np.int32) for column in (step, src, dst, block))
    return Schedule("chain", nodes, sources, len(orders[0]), *columns)


def _one_chain(groups: Groups, order: Sequence[int]) -> tuple[npt.NDArray[np.int64], ...]:
    """Columns step, src, dst, block, gather."""
    blocks = np.array(order, dtype=np.int64)
    place = np.arange(blocks.size)
    made: list[tuple[npt.NDArray[np.int64], ...]] = []
    arrival = np.full(blocks.size, -1)  # the step in which each came to the sending group, and by which of its devices
    entry: npt.NDArray[np.int64] | None = None
    for sender, receiver in pairwise(groups):
        shards = min(len(sender), len(receiver))
        shard = place % shards
        gathered = 0 if entry is None else (entry != shard).astype(np.int64)
        step = _as_early(arrival + 1 + gathered, shards)
        src, dst = np.array(sender)[shard], np.array(receiver)[shard]
        made.append((step, src, dst, blocks, np.zeros_like(blocks)))
        for index, node in enumerate(receiver):
            others = shard != index
            to = np.full(int(others.sum()), node)
            made.append((step[others] + 1, dst[others], to, blocks[others], np.ones_like(to)))
        arrival, entry = step, shard
    return tuple(np.concatenate(column) for column in zip(*made, strict=True))


def _as_early(ready: Ints | npt.NDArray[np.int64], shards: int) -> npt.NDArray[np.int64]:
    """The step of each block of a hop, which every shard sends one after the other, none before its ``ready``."""
    step = np.empty_like(ready, dtype=np.int64)
    for shard in range(shards):
        mine = ready[shard::shards]
        turn = np.arange(mine.size)
        step[shard::shards] = np.maximum.accumulate(mine - turn) + turn
    return step
