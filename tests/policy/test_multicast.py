"""Every schedule is sound: each block once to each node, one send and one receive per step, nothing sent unheld."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.multicast.binomial import binomial
from prism.policy.multicast.planner import ALGORITHMS, STEPS, build_schedule
from prism.policy.multicast.schedule import build, violations
from prism.policy.multicast.simple import binary_tree, chain, one_to_all


def binomial_steps(nodes: int, blocks: int) -> int:
    """The paper's count for powers of two, one more otherwise; a plain binomial tree for one block."""
    if blocks == 1:
        return math.ceil(math.log2(nodes))
    floor = nodes.bit_length() - 1
    return blocks + floor - 1 if nodes == 1 << floor else blocks + floor


@pytest.mark.parametrize("nodes", range(2, 65))
def test_binomial_pipeline_is_sound_and_optimal(nodes: int) -> None:
    for blocks in range(1, 41):
        schedule = binomial(nodes, blocks)
        assert violations(schedule) == [], (nodes, blocks)
        assert schedule.steps == binomial_steps(nodes, blocks), (nodes, blocks)
        assert schedule.transfers == (nodes - 1) * blocks


@settings(max_examples=30, deadline=None)
@given(nodes=st.integers(65, 600), blocks=st.integers(1, 80))
def test_binomial_pipeline_beyond_the_table(nodes: int, blocks: int) -> None:
    schedule = binomial(nodes, blocks)
    assert violations(schedule) == []
    assert schedule.steps == binomial_steps(nodes, blocks)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(ALGORITHMS)), nodes=st.integers(2, 40), blocks=st.integers(1, 24), data=st.data())
def test_every_algorithm_with_any_number_of_sources(name: str, nodes: int, blocks: int, data: st.DataObject) -> None:
    sources = data.draw(st.integers(1, nodes - 1))
    schedule = build_schedule(ALGORITHMS[name], nodes, sources, blocks)
    assert violations(schedule) == []
    assert schedule.transfers == (nodes - sources) * blocks
    assert not set(schedule.dst.tolist()) & set(range(sources)), "a source receives"


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_steps_without_building_the_schedule(name: str) -> None:
    for nodes in range(2, 34):
        for blocks in (1, 2, 3, 16):
            assert STEPS[name](nodes, blocks) == ALGORITHMS[name](nodes, blocks).steps, (nodes, blocks)


@pytest.mark.parametrize("nodes", [2, 3, 8, 13])
@pytest.mark.parametrize("blocks", [1, 2, 16])
def test_step_counts_of_the_alternatives(nodes: int, blocks: int) -> None:
    assert chain(nodes, blocks).steps == blocks + nodes - 2
    assert one_to_all(nodes, blocks).steps == blocks * (nodes - 1)


def test_binary_tree_sends_each_block_to_two_children() -> None:
    schedule = binary_tree(7, 4)
    assert {d for d, _ in schedule.sends(0)} == {1, 2}
    assert {d for d, _ in schedule.sends(2)} == {5, 6}
    assert schedule.sends(6) == []
    # the last leaf has block 0 after 4 steps and one more block every second step
    assert schedule.steps == 4 + 2 * 3


def test_a_two_node_tree_is_a_chain() -> None:
    assert binary_tree(2, 5).steps == chain(2, 5).steps == 5


@pytest.mark.parametrize("make", [binomial, chain, binary_tree, one_to_all])
@pytest.mark.parametrize(("nodes", "blocks"), [(1, 4), (0, 1), (4, 0)])
def test_impossible_sizes_are_refused(make: object, nodes: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="2 nodes and 1 block"):
        make(nodes, blocks)  # type: ignore[operator]


def test_violations_finds_each_kind_of_flaw() -> None:
    sound = chain(3, 2)

    def changed(**columns: object) -> list[str]:
        parts = {name: getattr(sound, name).copy() for name in ("step", "src", "dst", "block")}
        for name, (index, value) in columns.items():  # type: ignore[misc]
            parts[name][index] = value
        return violations(build("broken", 3, 1, 2, **parts))

    assert changed() == []
    assert any("does not hold" in v for v in changed(step=(2, 0)))
    assert any("sends twice" in v for v in changed(step=(1, 0)))
    assert any("gets block" in v for v in changed(block=(1, 0)))
    assert any("never gets" in v for v in changed(dst=(1, 2)))
