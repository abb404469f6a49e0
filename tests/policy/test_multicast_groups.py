"""lambda-Scale's Algorithms 1 and 2 against the example of its Figure 5 (2 -> 8, four blocks), and in general."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.multicast.binomial import binomial
from prism.policy.multicast.groups import k_way, pipelines, sub_groups, transfer_orders


def test_figure_5_transfer_orders() -> None:
    # sub-group 1 sends blocks 1-2 and then 3-4, sub-group 2 the other way round (counted from zero here)
    assert transfer_orders(2, 4) == [[0, 1, 2, 3], [2, 3, 0, 1]]


def test_figure_5_sub_groups_and_pipelines() -> None:
    groups = sub_groups(8, 2)
    # node 1 serves nodes 3-5, node 2 serves nodes 6-8
    assert groups == [[0, 2, 3, 4], [1, 5, 6, 7]]
    # three pipelines: nodes 3 and 6, 4 and 7, 5 and 8
    assert pipelines([group[1:] for group in groups]) == [[2, 5], [3, 6], [4, 7]]


def test_figure_5_first_pipelines_hold_the_model_after_half_of_the_blocks() -> None:
    schedule = k_way(binomial, 8, 2, 4)
    held: dict[int, set[int]] = {node: set() for node in range(8)}
    complete_at: dict[tuple[int, int], int] = {}
    for step in range(schedule.steps):
        for i in (schedule.step == step).nonzero()[0]:
            held[int(schedule.dst[i])].add(int(schedule.block[i]))
        for pair in ((2, 5), (3, 6), (4, 7)):
            if held[pair[0]] | held[pair[1]] == {0, 1, 2, 3}:
                complete_at.setdefault(pair, step + 1)
    assert max(complete_at.values()) < schedule.steps  # before any node alone has everything
    assert set(complete_at) == {(2, 5), (3, 6), (4, 7)}


def test_without_the_shift_every_group_has_the_same_order() -> None:
    shifted, plain = k_way(binomial, 8, 2, 4), k_way(binomial, 8, 2, 4, shift=False)
    assert [b for _, b in plain.sends(1)] == [b for _, b in plain.sends(0)]
    assert [b for _, b in shifted.sends(1)] != [b for _, b in shifted.sends(0)]


@settings(deadline=None)
@given(sources=st.integers(1, 12), blocks=st.integers(1, 60))
def test_every_order_has_every_block_once(sources: int, blocks: int) -> None:
    orders = transfer_orders(sources, blocks)
    assert len(orders) == sources
    assert all(sorted(order) == list(range(blocks)) for order in orders)


@settings(deadline=None)
@given(sources=st.integers(1, 8), blocks=st.integers(1, 8))
def test_the_first_chunks_together_are_the_model(sources: int, blocks: int) -> None:
    size = -(-blocks // sources)
    first = {block for order in transfer_orders(sources, blocks) for block in order[:size]}
    assert first == set(range(blocks))


@settings(deadline=None)
@given(data=st.data(), nodes=st.integers(2, 50))
def test_sub_groups_share_the_receivers_evenly(data: st.DataObject, nodes: int) -> None:
    sources = data.draw(st.integers(1, nodes - 1))
    groups = sub_groups(nodes, sources)
    assert sorted(node for group in groups for node in group) == list(range(nodes))
    assert [group[0] for group in groups] == list(range(sources))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_pipelines_use_every_node_once_and_as_many_groups_as_there_are(sizes: list[int]) -> None:
    groups = [[(g, t) for t in range(size)] for g, size in enumerate(sizes)]
    made = pipelines(groups)  # type: ignore[arg-type]
    assert sorted(node for p in made for node in p) == sorted(node for g in groups for node in g)
    for pipeline in made[:-1]:
        assert len({g for g, _ in pipeline}) == len(pipeline), "two nodes of one sub-group in a mixed pipeline"  # type: ignore[misc]


@pytest.mark.parametrize(("nodes", "sources"), [(4, 0), (4, 4), (2, 5)])
def test_sub_groups_refuse_impossible_numbers(nodes: int, sources: int) -> None:
    with pytest.raises(ValueError, match="sources"):
        sub_groups(nodes, sources)
