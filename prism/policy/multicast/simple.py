"""The alternatives to the binomial pipeline, behind the same interface: chain, binary tree, one to all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prism.policy.multicast.chain_schedule import chain_schedule
from prism.policy.multicast.schedule import Schedule, build


def chain(nodes: int, blocks: int) -> Schedule:
    """Every node passes each block to the next one: blocks + nodes - 2 steps (BlitzScale's serial forwarding)."""
    _check(nodes, blocks)
    return chain_schedule([[[node] for node in range(nodes)]], nodes, 1, [range(blocks)])


def binary_tree(nodes: int, blocks: int) -> Schedule:
    """Node i passes each block to nodes 2i+1 and 2i+2, one after the other (FaaSNet's topology)."""
    block, dst = _grid(nodes, blocks)
    arrival = np.array([_tree_arrival(node) for node in range(nodes)])
    period = 1 if nodes == 2 else 2  # a parent has two children to serve before the next block
    return _schedule("tree", nodes, blocks, arrival[dst] + period * block, (dst - 1) // 2, dst, block)


def chain_steps(nodes: int, blocks: int) -> int:
    return blocks + nodes - 2


def tree_steps(nodes: int, blocks: int) -> int:
    """The slowest node waits for both halves of every step on its path, and for two steps per further block."""
    if nodes == 2:
        return blocks
    return max(_tree_arrival(node) for node in range(max(1, nodes // 2), nodes)) + 1 + 2 * (blocks - 1)


def one_to_all_steps(nodes: int, blocks: int) -> int:
    return blocks * (nodes - 1)


def _tree_arrival(node: int) -> int:
    """Step in which block 0 reaches ``node``: a left child gets it one step after its parent, a right child two."""
    step = -1
    while node > 0:
        step += 1 if node % 2 else 2
        node = (node - 1) // 2
    return step


def one_to_all(nodes: int, blocks: int) -> Schedule:
    """The source sends every block to every node itself: blocks x (nodes - 1) steps."""
    block, dst = _grid(nodes, blocks)
    return _schedule("one-to-all", nodes, blocks, block * (nodes - 1) + dst - 1, np.zeros_like(dst), dst, block)


def _grid(nodes: int, blocks: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    _check(nodes, blocks)
    block, dst = np.meshgrid(np.arange(blocks), np.arange(1, nodes), indexing="ij")
    return block.ravel(), dst.ravel()


def _check(nodes: int, blocks: int) -> None:
    if nodes < 2 or blocks < 1:
        raise ValueError(f"a multicast needs 2 nodes and 1 block, got {nodes} and {blocks}")


def _schedule(name: str, nodes: int, blocks: int, *columns: npt.NDArray[np.int64]) -> Schedule:
    return build(name, nodes, 1, blocks, *(c.astype(np.int32) for c in columns))
