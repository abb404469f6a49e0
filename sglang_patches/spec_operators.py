"""Operators of speculative decoding that SGLang calls on a CPU and that its wheel for CPUs does not have, in torch.

A step checks a tree of guessed tokens for each request, nodes in an order in which parents come first. The tree is
said by three tables of ``n`` nodes per request (SGLang spells them ``retrive_*``): the node's number in the batch, its
first child and its next sibling within the request; -1: none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

NAMESPACE: Final = "sgl_kernel"


def read_rows(requests: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, _width: int) -> None:
    """``assign_extend_cache_locs_cpu``: the slots of tokens ``start`` to ``end`` of each request, one behind the
    other, into the beginning of ``out``. ``table`` [rows, tokens]: slots by request and token."""
    done = 0
    for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        out[done : done + last - first] = table[row, first:last]
        done += last - first


def write_rows(requests: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, _width: int) -> None:
    """``assign_req_to_token_pool_cpu``: the other way round."""
    done = 0
    for row, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = slots[done : done + last - first].to(table.dtype)
        done += last - first


def take_accepted(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    """``fill_accept_out_cache_loc_cpu``: the slots of the accepted nodes (-1: none), one behind the other."""
    chosen = accepted.flatten()
    chosen = chosen[chosen >= 0].long()
    out[: len(chosen)] = slots[chosen].to(out.dtype)


def read_tree(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    batch: int,
    nodes: int,
) -> None:
    """``reconstruct_indices_from_tree_mask_cpu``: from ``mask`` [batch * nodes * nodes], which ancestors each node sees
    (and itself), the tables and the ``positions`` of nodes behind sequences of ``lengths``."""
    seen = mask.view(batch, nodes, nodes).bool().tril(-1)
    order = torch.arange(nodes)
    parent = torch.where(seen, order, -1).amax(-1)
    positions.view(batch, nodes).copy_(seen.sum(-1) + lengths.view(-1, 1))
    index.view(batch, nodes).copy_(torch.arange(batch * nodes).view(batch, nodes))
    after = order.view(1, -1) > order.view(-1, 1)
    child.view(batch, nodes).copy_(_first(parent.unsqueeze(1) == order.view(1, -1, 1)))
    same = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent.unsqueeze(2) >= 0) & after
    sibling.view(batch, nodes).copy_(_first(same))


def _first(found: Tensor) -> Tensor:
    """The first true element of each row; -1: none."""
    return torch.where(found.any(-1), found.int().argmax(-1), -1)


def accept(
    predicts: Tensor,
    accepted: Tensor,
    count: Tensor,
    candidates: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    targets: Tensor,
) -> None:
    """``verify_tree_greedy_cpu``: from the root down, as long as a child is the token that the model says there.

    ``candidates``, ``targets`` [batch, nodes]: guessed tokens and what the model says behind each. Written are
    ``accepted`` [batch, depth], the numbers of accepted nodes with the root; ``count`` [batch], how many without it;
    and ``predicts`` [batch * nodes], the model's token behind each accepted node."""
    said = targets.flatten().tolist()
    tables = (candidates.tolist(), index.tolist(), child.tolist(), sibling.tolist())
    for row, (tokens, numbers, children, siblings) in enumerate(zip(*tables, strict=True)):
        path = [numbers[0]]
        node = children[0]
        while node != -1 and len(path) < accepted.shape[1]:
            if tokens[node] == said[path[-1]]:
                path.append(numbers[node])
                node = children[node]
            else:
                node = siblings[node]
        accepted[row, : len(path)] = torch.tensor(path, dtype=accepted.dtype)
        count[row] = len(path) - 1
        for number in path:
            predicts[number] = said[number]


def build_tree(
    parents: Tensor,
    chosen: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    branches: int,
    _depth: int,
    nodes: int,
    mode: int,
) -> None:
    """``build_tree_kernel_efficient_cpu``: from what a model guessed to ``mask``, ``positions`` and the tables, as
    :func:`read_tree` has them.

    Guesses are numbered in the order in which they were made: ``branches`` behind the root, then in each step
    ``branches`` behind each node that is gone on from. ``chosen`` [batch, nodes - 1]: those in the tree, ascending.
    ``parents`` [batch, ...]: -1 for the root, then the guesses that were gone on from, in that order. ``mode``: 1, the
    nodes see each other and all that is before them. Raises ``ValueError`` for others."""
    if mode != 1:
        raise ValueError(f"the mode of a tree's mask is {mode}; on a CPU it is 1 (nodes only)")
    batch = len(chosen)
    seen = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    for row, (numbers, known) in enumerate(zip(chosen.tolist(), parents.tolist(), strict=True)):
        places = {number: node for node, number in enumerate(numbers, 1)}
        for node, number in enumerate(numbers, 1):
            origin = number // branches
            above = 0 if origin == 0 else places.get(known[origin])
            if above is not None:  # at a tie a guess may be in the tree without the one before it
                seen[row, node] |= seen[row, above]
    mask.view(batch, nodes, nodes).copy_(seen)
    read_tree(mask, lengths, positions, index, child, sibling, batch, nodes)


def read_branches(
    requests: Tensor, table: Tensor, lengths: Tensor, out: Tensor, width: int, branches: int, steps: int
) -> None:
    """``assign_draft_cache_locs_contiguous_cpu``: the slots behind each sequence that its guesses are made in, branch
    by branch."""
    read_rows(requests, table, lengths, lengths + branches * steps, out, width)


def take_last(accepted: Tensor, lengths: Tensor, out: Tensor, depth: int) -> None:
    """``fill_bonus_tokens_cpu``: of the accepted tokens [batch * depth] of each request, ``lengths`` of them, the
    last."""
    out.copy_(accepted.view(-1, depth).gather(1, lengths.view(-1, 1).long() - 1).view(-1))


_ROWS: Final = "(Tensor requests, Tensor{a} table, Tensor start, Tensor end, Tensor{b} slots, int width) -> ()"
OPERATORS: Final[dict[str, tuple[Callable[..., None], str]]] = {
    "assign_extend_cache_locs_cpu": (read_rows, _ROWS.format(a="", b="(a!)")),
    "assign_req_to_token_pool_cpu": (write_rows, _ROWS.format(a="(a!)", b="")),
    "fill_accept_out_cache_loc_cpu": (take_accepted, "(Tensor accepted, Tensor slots, Tensor(a!) out) -> ()"),
    "reconstruct_indices_from_tree_mask_cpu": (
        read_tree,
        "(Tensor mask, Tensor lengths, Tensor(a!) positions, Tensor(b!) index, Tensor(c!) child, Tensor(d!) sibling,"
        " int batch, int nodes) -> ()",
    ),
    "verify_tree_greedy_cpu": (
        accept,
        "(Tensor(a!) predicts, Tensor(b!) accepted, Tensor(c!) count, Tensor candidates, Tensor index, Tensor child,"
        " Tensor sibling, Tensor targets) -> ()",
    ),
    "build_tree_kernel_efficient_cpu": (
        build_tree,
        "(Tensor parents, Tensor chosen, Tensor lengths, Tensor(a!) mask, Tensor(b!) positions, Tensor(c!) index,"
        " Tensor(d!) child, Tensor(e!) sibling, int branches, int depth, int nodes, int mode) -> ()",
    ),
    "assign_draft_cache_locs_contiguous_cpu": (
        read_branches,
        "(Tensor requests, Tensor table, Tensor lengths, Tensor(a!) out, int width, int branches, int steps) -> ()",
    ),
    "fill_bonus_tokens_cpu": (
        take_last,
        "(Tensor accepted, Tensor lengths, Tensor(a!) out, int depth) -> ()",
    ),
}
"""Name -> what it does, and its signature."""


@cache
def define_missing() -> Any:
    """Once per process: those that the library does not have. They last as long as the result."""
    importlib.import_module(NAMESPACE)
    library, known = torch.library.Library(NAMESPACE, "FRAGMENT"), getattr(torch.ops, NAMESPACE)
    for name, (function, signature) in OPERATORS.items():
        if not hasattr(known, name):
            library.define(name + signature)
            library.impl(name, function, "CPU")
    return library
