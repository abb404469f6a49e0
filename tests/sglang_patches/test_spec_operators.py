"""The operators of speculative decoding on a CPU do what SGLang's do on a GPU: against trees walked by hand."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.spec_operators import (
    accept,
    build_tree,
    read_branches,
    read_rows,
    read_tree,
    take_accepted,
    take_last,
    write_rows,
)


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


@st.composite
def guessed(draw: st.DrawFn) -> tuple[int, list[int], list[int], dict[int, int | None]]:
    """(Branches, which guesses were gone on from as SGLang says it, the chosen ones, what each was guessed behind)."""
    branches, steps = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    behind: dict[int, int | None] = dict.fromkeys(range(branches))
    gone_on, said = list(range(branches)), [-1, *range(branches)]
    for step in range(1, steps):
        first = len(behind)
        behind |= {first + at: gone_on[at // branches] for at in range(branches**2)}
        kept = draw(st.permutations(range(first, len(behind))))
        gone_on = list(kept[:branches])
        said += gone_on if step < steps - 1 else []
    picked: set[int] = set()
    for leaf in draw(st.sets(st.sampled_from(sorted(behind)), min_size=1, max_size=3)):
        guess: int | None = leaf
        while guess is not None:
            picked.add(guess)
            guess = behind[guess]
    return branches, said, sorted(picked), behind


@given(guessed(), st.integers(0, 50))
def test_a_tree_of_what_a_model_guessed(
    case: tuple[int, list[int], list[int], dict[int, int | None]], length: int
) -> None:
    branches, said, picked, behind = case
    nodes = len(picked) + 1
    mask = torch.zeros(nodes * nodes, dtype=torch.bool)
    positions = torch.empty(nodes, dtype=torch.int64)
    index, child, sibling = (torch.empty((1, nodes), dtype=torch.int64) for _ in range(3))
    chosen, lengths = torch.tensor([picked]), torch.tensor([length])
    build_tree(
        torch.tensor([said]), chosen, lengths, mask, positions, index, child, sibling, branches, len(picked), nodes, 1
    )
    parent = [-1]
    for guess in picked:
        before = behind[guess]
        parent.append(0 if before is None else 1 + picked.index(before))
    found = tables([parent], [length])
    assert [t.flatten().tolist() for t in (positions, index, child, sibling)] == [t.flatten().tolist() for t in found]
    seen = mask.view(nodes, nodes)
    assert all(seen[node].nonzero().flatten().tolist() == path_to(parent, node) for node in range(nodes))


def test_a_guess_whose_parent_is_not_in_the_tree_is_nobodys_child() -> None:
    """SGLang's choice of the likeliest may do so when two are equally likely."""
    positions, mask = torch.empty(3, dtype=torch.int64), torch.zeros(9, dtype=torch.bool)
    index, child, sibling = (torch.empty((1, 3), dtype=torch.int64) for _ in range(3))
    said, chosen, lengths = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 4]]), torch.tensor([7])
    build_tree(said, chosen, lengths, mask, positions, index, child, sibling, 2, 2, 3, 1)
    assert child.tolist() == [[1, -1, -1]]
    assert sibling.tolist() == [[-1, -1, -1]]


def test_slots_of_guesses_and_last_tokens() -> None:
    table, out = torch.arange(30).view(3, 10), torch.zeros(8, dtype=torch.int64)
    read_branches(torch.tensor([2, 0]), table, torch.tensor([1, 4]), out, 10, 2, 2)
    assert out.tolist() == [21, 22, 23, 24, 4, 5, 6, 7]
    last = torch.zeros(2, dtype=torch.int32)
    take_last(torch.tensor([5, 6, 7, 8, 9, 9], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32), last, 3)
    assert last.tolist() == [7, 8]


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
