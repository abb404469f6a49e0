"""Pipelines over receivers of a multicast: every block has a runner that holds it, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.policy.live.pipelines import (
    ExecutionPipeline,
    LivePlan,
    LiveRequest,
    PipelineSeat,
    plan_live,
    plan_warm,
    share_blocks,
)
from prism.policy.multicast.estimate import NodeLink, block_times
from prism.policy.multicast.planner import PlanRequest


def request_of(sources: int, receivers: int, blocks: int, **further: object) -> PlanRequest:
    return PlanRequest(
        tuple(f"s{i}" for i in range(sources)),
        tuple(f"r{i}" for i in range(receivers)),
        nbytes=1 << 30,
        blocks=blocks,
        **further,  # type: ignore[arg-type]
    )


def arrivals(request: LiveRequest, found: LivePlan) -> dict[PipelineSeat, list[float]]:
    """When each seat has each block, told again from the multicast alone."""
    chosen, multicast = found.multicast, request.multicast
    links = [multicast.links.get(n, multicast.default_link) for n in chosen.nodes]
    block_bytes = multicast.nbytes / chosen.schedule.blocks
    held = block_times(chosen.schedule, links, block_bytes, multicast.overhead_s)
    local_s = block_bytes / request.local_bytes_s + multicast.overhead_s
    return {
        seat: (held[chosen.nodes.index(seat.node)] + seat.copy * local_s).tolist()
        for pipeline in found.pipelines
        for seat in pipeline.alone_s
    }


def check_pipeline(pipeline: ExecutionPipeline, blocks: int, has: dict[PipelineSeat, list[float]]) -> None:
    assert pipeline.runs[0].first == 0
    assert pipeline.runs[-1].end == blocks
    assert all(a.end == b.first for a, b in zip(pipeline.runs[:-1], pipeline.runs[1:], strict=True))
    for run in pipeline.runs:
        assert max(has[run.seat][run.first : run.end]) <= pipeline.ready_s
    for block in range(blocks):
        assert min(has[seat][block] for seat in pipeline.alone_s) <= pipeline.ready_s
    for seat, alone_s in pipeline.alone_s.items():
        assert alone_s == max(has[seat])


@settings(max_examples=60, deadline=None)
@given(
    sources=st.integers(1, 4),
    receivers=st.integers(1, 16),
    blocks=st.integers(1, 16),
    tp=st.integers(1, 2),
    devices=st.lists(st.integers(2, 5), min_size=16, max_size=16),
    rates=st.lists(st.sampled_from([1e8, 1e9]), min_size=16, max_size=16),
)
def test_every_free_instance_sits_in_one_pipeline_that_holds_the_model(
    sources: int, receivers: int, blocks: int, tp: int, devices: list[int], rates: list[float]
) -> None:
    links = {f"r{i}": NodeLink(rates[i], rates[i]) for i in range(receivers)}
    multicast = request_of(sources, receivers, blocks, links=links)
    request = LiveRequest(multicast, tp, {f"r{i}": devices[i] for i in range(receivers)})
    found = plan_live(request)
    has = arrivals(request, found)
    for pipeline in found.pipelines:
        check_pipeline(pipeline, blocks, has)
    seats = [seat for pipeline in found.pipelines for seat in pipeline.alone_s]
    assert len(set(seats)) == len(seats)
    assert sorted(seats, key=repr) == sorted(
        (PipelineSeat(f"r{i}", c) for i in range(receivers) for c in range(devices[i] // tp)), key=repr
    )


def test_papers_example_of_two_to_eight() -> None:
    """Figure 5: four blocks, two sources, six receivers: three pipelines of two, each with the chunk it has first."""
    found = plan_live(LiveRequest(request_of(2, 6, 4)))
    shape = [[(r.seat.node, r.first, r.end) for r in p.runs] for p in found.pipelines]
    assert shape == [
        [("r0", 0, 2), ("r3", 2, 4)],
        [("r1", 0, 2), ("r4", 2, 4)],
        [("r2", 0, 2), ("r5", 2, 4)],
    ]
    assert all(p.ready_s < min(p.alone_s.values()) for p in found.pipelines)


@pytest.mark.parametrize("sources", [2, 4])
def test_the_first_model_is_there_after_its_share_of_the_steps(sources: int) -> None:
    """4.2: k chunks arrive at once, so that a pipeline may begin after about blocks / k steps."""
    multicast = request_of(sources, 2 * sources, 16, overhead_s=0.0)
    found = plan_live(LiveRequest(multicast))
    step_s = multicast.nbytes / 16 / multicast.default_link.out_bytes_s
    assert min(p.ready_s for p in found.pipelines) <= (16 / sources + 2) * step_s


def test_further_devices_of_a_machine_are_further_pipelines() -> None:
    """Case 3: copies are made over the machine's own links, and a machine without a further device is in one only."""
    found = plan_live(LiveRequest(request_of(1, 3, 8), free_devices={"r0": 2, "r2": 3}))
    by_copy = [sorted({s.copy for s in p.alone_s}) for p in found.pipelines]
    assert by_copy == [[0], [1], [2]]
    assert {s.node for s in found.pipelines[1].alone_s} == {"r0", "r2"}
    first, second, third = (p.ready_s for p in found.pipelines)
    assert first < second
    assert third > second - 1e-9, "a single machine holds the model when it has all of it"


def test_a_machine_too_small_for_the_model_is_named() -> None:
    with pytest.raises(ValueError, match="r1 has 1 free devices, an instance takes 2"):
        plan_live(LiveRequest(request_of(1, 2, 4), tp=2, free_devices={"r1": 1}))


def test_machines_that_load_from_their_own_memory_are_a_pipeline_meanwhile() -> None:
    (pipeline,) = plan_warm(["a", "b", "c", "d"], 8, 8 << 20, 1 << 20)
    assert pipeline.ready_s == pytest.approx(2.0)
    assert [(r.seat.node, r.first, r.end) for r in pipeline.runs] == [
        ("a", 0, 2),
        ("b", 2, 4),
        ("c", 4, 6),
        ("d", 6, 8),
    ]
    assert list(pipeline.alone_s.values()) == pytest.approx([8.0] * 4)
    with pytest.raises(ValueError, match="machines and blocks"):
        plan_warm([], 8, 1, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 12))
def test_blocks_are_shared_among_holders(data: st.DataObject, members: int, blocks: int) -> None:
    holds = np.array(
        data.draw(
            st.lists(st.lists(st.booleans(), min_size=blocks, max_size=blocks), min_size=members, max_size=members)
        )
    )
    holds[data.draw(st.integers(0, members - 1)), ~holds.any(axis=0)] = True
    runner = share_blocks(holds)
    assert all(holds[member, block] for block, member in enumerate(runner.tolist()))


@pytest.mark.parametrize(("members", "blocks"), [(2, 8), (3, 8), (4, 4), (5, 3)])
def test_who_holds_everything_shares_it_evenly_in_single_runs(members: int, blocks: int) -> None:
    runner = share_blocks(np.ones((members, blocks), dtype=np.bool_))
    counts = np.bincount(runner, minlength=members)
    assert counts.max() == -(-blocks // members)
    assert np.count_nonzero(np.diff(runner)) == np.count_nonzero(counts) - 1
