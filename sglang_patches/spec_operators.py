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
