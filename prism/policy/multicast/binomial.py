"""The binomial pipeline (lambda-Scale 4.2; the schedule is RDMC's, DSN 2018): one source, any number of nodes.

For N = 2^L nodes the nodes are the vertices of an L-dimensional hypercube; step t uses dimension t mod L, and every
vertex exchanges one block with its neighbour there. For other N the first 2^L nodes are vertices and each further one
is the *twin* of a vertex: the two share its link duties, one receiving for both while the other sends, and pass each
other what the partner missed. Steps: blocks + L - 1 for powers of two, blocks + L otherwise, L = floor(log2 N).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prism.policy.multicast.schedule import NO_BLOCK, Ints, Schedule, build

Bools = npt.NDArray[np.bool_]


def binomial(nodes: int, blocks: int) -> Schedule:
    """Node 0 sends ``blocks`` >= 1 blocks to all of ``nodes`` >= 2. Raises ``ValueError`` otherwise."""
    if nodes < 2 or blocks < 1:
        raise ValueError(f"a multicast needs 2 nodes and 1 block, got {nodes} and {blocks}")
    if blocks == 1:
        return _tree(nodes)
    dims = nodes.bit_length() - 1
    incoming = _incoming(dims, blocks, blocks + dims - 1)
    return _hypercube(nodes, blocks, dims, incoming) if nodes == 1 << dims else _twins(nodes, blocks, dims, incoming)


def binomial_steps(nodes: int, blocks: int) -> int:
    """Steps of :func:`binomial` without building it: blocks + L - 1 for N = 2^L, blocks + L otherwise."""
    if blocks == 1:
        return (nodes - 1).bit_length()
    dims = nodes.bit_length() - 1
    return blocks + dims - (1 if nodes == 1 << dims else 0)


def _tree(nodes: int) -> Schedule:
    """One block: in step s every node below 2^s sends to the one 2^s further."""
    dst = np.arange(1, nodes, dtype=np.int32)
    step = np.array([d.bit_length() - 1 for d in range(1, nodes)], dtype=np.int32)
    src = dst - (np.int32(1) << step)
    return build("binomial", nodes, 1, 1, step, src, dst, np.zeros_like(dst))


def _incoming(dims: int, blocks: int, steps: int) -> Ints:
    """``[step, vertex]``: the block that the vertex's neighbour in dimension step mod dims sends it, or NO_BLOCK."""
    vertex = np.arange(1 << dims, dtype=np.int32)
    table = np.full((steps, 1 << dims), NO_BLOCK, dtype=np.int32)
    for dim in range(dims):
        # distance to the next set bit above dim, cyclically; dims when dim is the only one
        ahead = np.full(1 << dims, dims, dtype=np.int32)
        for k in range(dims - 1, 0, -1):
            ahead[(vertex >> ((dim + k) % dims)) & 1 == 1] = k
        up = (vertex >> dim) & 1 == 1
        for t in range(dim, steps, dims):
            block = np.where(up, np.minimum(t + ahead - dims, blocks - 1), t - dims)
            block[block < 0] = NO_BLOCK
            block[0] = NO_BLOCK
            table[t] = block
    return table


def _hypercube(nodes: int, blocks: int, dims: int, incoming: Ints) -> Schedule:
    step, dst = np.nonzero(incoming != NO_BLOCK)
    block = incoming[step, dst]
    src = dst ^ (1 << (step % dims))
    return _unique("binomial", nodes, blocks, step, src, dst, block)


def _twins(nodes: int, blocks: int, dims: int, incoming: Ints) -> Schedule:
    steps, vertices = incoming.shape
    paired = np.zeros(vertices, dtype=np.bool_)
    paired[1 : nodes - vertices + 1] = True
    high = np.arange(vertices) + vertices - 1
    low = np.arange(vertices)
    flips = _flips(dims, steps + 1)
    odd = flips % 2 == 1
    receiver = np.where(odd & paired, high, low)
    sender = np.where(~odd & paired, high, low)
    parts: list[tuple[npt.NDArray[np.int64], ...]] = []
    step, dst = np.nonzero(incoming != NO_BLOCK)
    src = dst ^ (1 << (step % dims))
    parts.append((step.astype(np.int64), sender[step, src], receiver[step, dst], incoming[step, dst].astype(np.int64)))
    parts.append(_passes(incoming, flips, paired, receiver, sender))
    parts.append(_swap(incoming, odd, paired, low, high))
    merged = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return _unique("binomial", nodes, blocks, *merged)


def _flips(dims: int, steps: int) -> npt.NDArray[np.int64]:
    """``[step, vertex]``: how often the twins of a vertex have changed duties up to the step."""
    vertex = np.arange(1 << dims)
    bits = np.array([int(v).bit_count() for v in vertex])
    table = np.empty((steps, 1 << dims), dtype=np.int64)
    for t in range(steps):
        table[t] = (t // dims) * bits + bits[vertex % (1 << (t % dims))]
    return table


def _passes(
    incoming: Ints,
    flips: npt.NDArray[np.int64],
    paired: Bools,
    receiver: npt.NDArray[np.int64],
    sender: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], ...]:
    """What the receiving twin passes to the sending one in the same step: the block the latter missed."""
    steps, vertices = incoming.shape
    vertex = np.flatnonzero(paired)
    last = np.full((int(flips.max()) + 1, vertices), NO_BLOCK, dtype=np.int64)  # last step with that many flips
    out: list[tuple[npt.NDArray[np.int64], ...]] = []
    for t in range(steps):
        now = flips[t, vertex]
        same = now == flips[t - 1, vertex] if t else np.zeros(vertex.size, dtype=np.bool_)
        earlier = np.where(now >= 2, last[np.maximum(now - 2, 0), vertex], NO_BLOCK)
        p = np.where(now == 0, NO_BLOCK, np.where(same, t - 1, earlier))
        block = np.where(p >= 0, incoming[np.maximum(p, 0), vertex], NO_BLOCK)
        sends = block != NO_BLOCK
        who = vertex[sends]
        out.append((np.full(who.size, t), receiver[t, who], sender[t, who], block[sends].astype(np.int64)))
        last[now, vertex] = t
    return tuple(np.concatenate(column) for column in zip(*out, strict=True))


def _swap(
    incoming: Ints, odd: Bools, paired: Bools, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], ...]:
    """The last step: twins give each other what they received last."""
    steps = incoming.shape[0]
    out: list[tuple[int, int, int, int]] = []
    for v in np.flatnonzero(paired).tolist():
        for mine, other, turn in ((int(low[v]), int(high[v]), False), (int(high[v]), int(low[v]), True)):
            own = np.flatnonzero(odd[:steps, v] == turn)
            if own.size and incoming[own[-1], v] != NO_BLOCK:
                out.append((steps, mine, other, int(incoming[own[-1], v])))
    columns = np.array(out, dtype=np.int64).reshape(-1, 4).T
    return tuple(columns)


def _unique(
    algorithm: str,
    nodes: int,
    blocks: int,
    step: npt.NDArray[np.int64],
    src: npt.NDArray[np.int64],
    dst: npt.NDArray[np.int64],
    block: npt.NDArray[np.int64] | Ints,
) -> Schedule:
    """The schedule without repetitions: near the end the formulas name the last block more than once."""
    order = np.argsort(step, kind="stable")
    first = np.unique(dst[order].astype(np.int64) * blocks + block[order], return_index=True)[1]
    keep = order[np.sort(first)]
    columns = [a[keep].astype(np.int32) for a in (step, src, dst, block)]
    return build(algorithm, nodes, 1, blocks, *columns)
