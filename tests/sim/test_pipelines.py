"""Instances that come together and serve over each other before any has everything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.core.effects import Activate
from prism.core.events import OperatorLoad, WaitingDealt
from prism.core.ids import DeviceId, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.scheduler.beginnings import HOLD_S
from prism.sim.cluster_file import parse_cluster
from prism.sim.engine import Phase
from prism.sim.pipelines import Pipelines, SimPipeline, part_needed
from prism.sim.sharing import Pool

from .scale_out import ScaleOut, llama_8b


class Coming(ScaleOut):
    """Nobody serves; ``instances`` are asked for at 0, each on a machine of its own that has the weights in memory:
    they take 4 s and more."""

    def __init__(
        self, live: LiveMode, instances: int = 3, rate: float = 4.0, requests: int = 40, **load: object
    ) -> None:
        group = {"gpu": "H100", "nodes": instances, "gpus_per_node": 1, "rates": {"pcie_bytes_per_s": 4e9}}
        super().__init__(parse_cluster({"groups": [group], "load": load}, "test"), llama_8b(), live)
        self.tell(OperatorLoad(self.spec.name, instances=instances))
        self.ask(requests, rate)

    def ttft_s(self) -> list[float]:
        return [r.ttft_s if r.ttft_s is not None else float("inf") for r in self.recorder.records]


def test_three_that_come_together_serve_after_a_third_of_the_time_and_then_alone() -> None:
    whole, piped = Coming(LiveMode.WHOLE), Coming(LiveMode.PIPELINES)
    for coming in (whole, piped):
        coming.run()
        assert len(coming.recorder.records) == len(coming.jobs) and not any(r.error for r in coming.recorder.records)
        assert len(coming.engines()) == 3 and all(engine.steps and engine._lean is None for engine in coming.engines())
    assert [event.early for _, event in whole.finished()] == [False] * 3
    assert [event.early for _, event in piped.finished()] == [True] * 3
    weights_s = max(at_s for at_s, _ in whole.finished())
    assert max(at_s for at_s, _ in piped.finished()) < 0.45 * weights_s
    assert sorted(piped.ttft_s())[-1] < sorted(whole.ttft_s())[-1]


@pytest.mark.parametrize("rate", [2.0, 10.0, 40.0])
def test_never_fewer_requests_are_begun_than_by_those_that_are_complete(rate: float) -> None:
    begun: list[list[float]] = []
    for live in (LiveMode.WHOLE, LiveMode.PIPELINES):
        coming = Coming(live, rate=rate)
        coming.run()
        begun.append(sorted(r.arrival_s + (r.ttft_s or 0.0) for r in coming.recorder.records))
    assert all(piped <= whole + 0.02 for whole, piped in zip(*begun, strict=True))  # but for a step
    assert sum(begun[1]) < sum(begun[0])


def test_what_waited_is_dealt_to_those_that_come_up_and_shared_out_by_what_is_reported_then() -> None:
    """As the controller does it (:mod:`prism.controller.dealing`)."""
    coming = Coming(LiveMode.PIPELINES, rate=1000.0, requests=60)
    coming.run()
    settled = [(at_s, event.settled) for at_s, event in coming.told if isinstance(event, WaitingDealt)]
    assert [each for _, each in settled[:2]] == [False, True] and settled[-1][1]
    first_s, last_s = coming.finished()[0][0], coming.finished()[-1][0]
    assert first_s <= settled[0][0] <= first_s + HOLD_S and settled[1][0] >= last_s
    assert all(engine.steps for engine in coming.engines())


def test_one_alone_comes_whole() -> None:
    alone = Coming(LiveMode.PIPELINES, instances=1)
    alone.run()
    assert [event.early for _, event in alone.finished()] == [False]


def test_stages_that_cost_nothing_are_faster_and_the_setting_is_read() -> None:
    measured, even = Coming(LiveMode.PIPELINES, rate=20.0), Coming(LiveMode.PIPELINES, rate=20.0, stage_wait=0.0)
    for coming in (measured, even):
        coming.run()
    assert sum(even.ttft_s()) < sum(measured.ttft_s())


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.floats(0.2, 6.0), st.integers(0, 3), st.sampled_from([2.0, 10.0, 30.0]))
def test_no_request_is_lost_whoever_dies_when(instances: int, dies_s: float, which: int, rate: float) -> None:
    coming = Coming(LiveMode.PIPELINES, instances, rate, requests=30)

    def kill(_: object) -> None:
        keys = sorted(coming.world.nodes.instances)
        serving = [key for key in keys if coming.world.nodes.instances[key].engine is not None]
        if serving:
            coming.world.nodes.lose_instance(serving[which % len(serving)])

    coming.world.queue.after(dies_s, kill)
    coming.run()
    ended = [record.row for record in coming.recorder.records]
    assert sorted(ended) == list(range(30)) and not any(r.error for r in coming.recorder.records)
    assert all(engine._lean is None for engine in coming.engines())


class Stepping:
    def __init__(self, phase: Phase) -> None:
        self.phase = phase


@given(st.integers(2, 8), st.integers(0, 8), st.floats(0.0, 0.9))
def test_leaders_together_do_at_least_the_work_of_one(members: int, leading: int, stage_wait: float) -> None:
    keys = [InstanceKey(llama_8b().name, i) for i in range(members)]
    pipeline = SimPipeline(tuple(keys), 1.0 / members, stage_wait, {key: (Pool(1.0),) for key in keys})
    for i, key in enumerate(keys):
        pipeline.leaders[key] = Stepping(Phase.DECODE if i < leading else Phase.IDLE)  # type: ignore[assignment]
    split = pipeline.split(())
    leading = max(1, min(leading, members))
    assert leading / split.length >= 1.0
    assert leading * sum(split.shares) == pytest.approx(leading / split.length)
    assert leading * split.shares[0] <= 1.0  # no pool is asked for more than it has


def test_two_leaders_do_the_work_that_was_measured() -> None:
    keys = [InstanceKey(llama_8b().name, i) for i in range(3)]
    for leading, work in ((2, 1.45), (3, 1.7)):
        pipeline = SimPipeline(tuple(keys), 1 / 3, 0.38, {key: (Pool(1.0),) for key in keys})
        pipeline.leaders = {key: Stepping(Phase.PREFILL) for key in keys[:leading]}  # type: ignore[misc]
        assert leading / pipeline.split(()).length == pytest.approx(work, abs=0.01)


def order(number: int, node: str) -> Activate:
    parts = whole_model((DeviceId(f"{node}/cuda:{number}"),))
    return Activate(
        InstanceKey(llama_8b().name, number), parts, because(ReasonCode.SCALE_OUT), None, LiveMode.PIPELINES
    )


def deal(nodes: list[str], warm: set[str], sources: int) -> list[tuple[int, float] | None]:
    """Of each order, its sub-group and its pipeline's part."""
    orders = [order(i, node) for i, node in enumerate(nodes)]
    pools = {o.key: (Pool(1.0),) for o in orders}
    seats = Pipelines(0.38).deal(orders, {NodeId(n) for n in warm}, sources, pools)
    found = [seats.get(o.key) for o in orders]
    return [None if s is None else (s.group, s.pipeline.part if s.pipeline else 1.0) for s in found]


def test_seats_are_those_of_the_production_algorithms() -> None:
    assert deal(["a", "b"], {"a", "b"}, 0) == [(0, 0.5), (1, 0.5)]
    assert deal(["a", "b", "c", "d"], set(), 2) == [(0, 0.5), (0, 0.5), (1, 0.5), (1, 0.5)]
    assert deal(["a", "b", "c"], set(), 1) == [None, None, None]  # all get the same pieces at the same time
    assert deal(["a", "b", "c"], set(), 2) == [(0, 0.5), (0, 1.0), (1, 0.5)]  # the third has nobody to sit with
    assert deal(["a", "a", "b", "b"], set(), 2) == [(0, 0.5), (0, 0.5), (1, 0.5), (1, 0.5)]
    assert deal(["a", "b", "c"], {"a"}, 2) == [None, (0, 0.5), (1, 0.5)]


@given(st.integers(1, 6), st.data())
def test_members_have_everything_together_with_their_part_and_not_before(turns: int, data: st.DataObject) -> None:
    taken = data.draw(st.sets(st.integers(0, turns - 1), min_size=1))
    cells = 60

    def together(part: float) -> bool:
        held = {(t * cells // turns + i) % cells for t in taken for i in range(round(part * cells))}
        return len(held) == cells

    part = part_needed(taken, turns)
    assert together(part) and not together(part - 1 / cells)
