"""The operators of speculative decoding on a CPU do what SGLang's do on a GPU: against trees walked by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.spec_operators import accept, read_rows, read_tree, take_accepted, write_rows


def parents(nodes: int) -> st.SearchStrategy[list[int]]:
    """Of each node but the root, an earlier one."""
    return st.tuples(*(st.integers(0, node - 1) for node in range(1, nodes))).map(lambda found: [-1, *found])


def path_to(parent: list[int], node: int) -> list[int]:
    return [*path_to(parent, parent[node]), node] if node != -1 else []


def tables(trees: list[list[int]], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Positions, numbers, children and siblings, as ``read_tree`` finds them."""
    batch, nodes = len(trees), len(trees[0])
    mask = torch.zeros((batch, nodes, nodes), dtype=torch.bool)
    for at, parent in enumerate(trees):
        for node in range(nodes):
            mask[at, node, path_to(parent, node)] = True
    positions = torch.empty(batch * nodes, dtype=torch.int64)
    index, child, sibling = (torch.empty((batch, nodes), dtype=torch.int64) for _ in range(3))
    read_tree(mask.flatten(), torch.tensor(lengths), positions, index, child, sibling, batch, nodes)
    return positions, index, child, sibling


@given(st.integers(1, 8).flatmap(lambda n: st.lists(parents(n), min_size=1, max_size=3)))
def test_tables_of_a_tree(trees: list[list[int]]) -> None:
    nodes, lengths = len(trees[0]), [10 * at for at in range(len(trees))]
    positions, index, child, sibling = tables(trees, lengths)
    assert index.flatten().tolist() == list(range(len(trees) * nodes))
    for at, parent in enumerate(trees):
        for node in range(nodes):
            assert positions[at * nodes + node] == lengths[at] + len(path_to(parent, node)) - 1
            children = [n for n in range(nodes) if parent[n] == node]
            assert child[at, node] == (children[0] if children else -1)
            later = [n for n in range(node + 1, nodes) if parent[n] == parent[node] and node > 0]
            assert sibling[at, node] == (later[0] if later else -1)


@given(
    st.integers(1, 8).flatmap(
        lambda n: st.lists(
            st.tuples(parents(n), *(st.lists(st.integers(0, 2), min_size=n, max_size=n) for _ in range(2))),
            min_size=1,
            max_size=3,
        )
    )
)
def test_the_accepted_are_what_the_model_says(rows: list[tuple[list[int], list[int], list[int]]]) -> None:
    nodes = len(rows[0][0])
    _, index, child, sibling = tables([parent for parent, _, _ in rows], [0] * len(rows))
    predicts = torch.full((len(rows) * nodes,), -7, dtype=torch.int32)
    accepted = torch.full((len(rows), nodes), -1, dtype=torch.int32)
    count = torch.empty(len(rows), dtype=torch.int32)
    guessed, said = torch.tensor([g for _, g, _ in rows]), torch.tensor([s for _, _, s in rows])
    accept(predicts, accepted, count, guessed, index, child, sibling, said)
    for at, (parent, tokens, targets) in enumerate(rows):
        path = [0]
        while fits := [n for n in range(nodes) if parent[n] == path[-1] and tokens[n] == targets[path[-1]]]:
            path.append(fits[0])
        assert count[at] == len(path) - 1
        assert accepted[at].tolist() == [at * nodes + n for n in path] + [-1] * (nodes - len(path))
        assert predicts[at * nodes : (at + 1) * nodes].tolist() == [
            targets[n] if n in path else -7 for n in range(nodes)
        ]


def test_rows_of_the_request_table() -> None:
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    requests, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    out = torch.zeros(6, dtype=torch.int64)
    read_rows(requests, table, start, end, out, 10)
    assert out.tolist() == [21, 22, 23, 4, 5, 0]
    write_rows(requests, table, start, end, torch.tensor([-1, -2, -3, -4, -5]), 10)
    assert table[2].tolist() == [20, -1, -2, -3, 24, 25, 26, 27, 28, 29]
    assert table[0].tolist() == [0, 1, 2, 3, -4, -5, 6, 7, 8, 9]
    out = torch.zeros(6, dtype=torch.int64)
    take_accepted(torch.tensor([[3, 1, -1], [0, -1, -1]]), torch.tensor([100, 101, 102, 103]), out)
    assert out.tolist() == [103, 101, 100, 0, 0, 0]
