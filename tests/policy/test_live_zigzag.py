"""ZigZag's queue: its rules, nothing lost, and how near it comes to the integer program it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.live.zigzag import arriving_program_mean_s, evenly, mean_s, program_mean_s, waiting
from prism.policy.live.paired import PairedBatch, PairRule, finish_pair
from prism.policy.live.zigzag import ZigZagQueue, ZigZagWork


@pytest.mark.parametrize("layers", [7, 16, 32])
@pytest.mark.parametrize("load_s", [1.0, 3.0, 6.0])
def test_the_queue_is_near_the_integer_program(layers: int, load_s: float) -> None:
    for count in (4, 8, 12):
        rule = mean_s(PairRule.ZIGZAG, waiting(count), layers, load_s)
        assert rule <= 1.10 * program_mean_s(count, layers, load_s)


def test_papers_example_is_better_than_best_effort_and_stopping() -> None:
    """Figure 15: 7 layers, one of which loads in the time that 6 take."""
    means = {rule: mean_s(rule, waiting(7), 7, 6.0) for rule in PairRule}
    assert means[PairRule.ZIGZAG] < means[PairRule.BEST_EFFORT] < means[PairRule.STOP]


TIMES = st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 3)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(TIMES, st.integers(1, 12), st.floats(0, 10))
def test_never_worse_than_the_old_instance_alone(times: list[tuple[float, float]], layers: int, load_s: float) -> None:
    """Whatever arrives: every batch finishes once, not before it could, and the last one no later than the old
    instance alone would be done."""
    batches = [PairedBatch(f"b{i}", at, layer_s) for i, (at, layer_s) in enumerate(sorted(times))]
    for rule in PairRule:
        finish = finish_pair(rule, batches, layers, load_s)
        alone_s = 0.0
        for batch in batches:
            alone_s = max(alone_s, batch.arrival_s) + layers * batch.layer_s
            assert finish[batch.name] >= batch.arrival_s + layers * batch.layer_s - 1e-6
        assert max(finish.values()) <= alone_s + max(b.layer_s for b in batches) + 1e-6


class TwoSides:
    """Both sides of a queue, driven by drawn steps; what was run is checked layer by layer."""

    def __init__(self, layers: int) -> None:
        self.queue, self.layers = ZigZagQueue(layers), layers
        self.ran: dict[str, list[int]] = {}
        self.running: dict[str, ZigZagWork] = {}
        self.finished: list[str] = []

    def ask(self, side: str) -> bool:
        if side in self.running:
            return False
        work = self.queue.for_new() if side == "new" else self.queue.for_old()
        if work is None:
            return False
        assert work.batch not in {w.batch for w in self.running.values()}
        assert side == "old" or work.end <= self.queue.loaded
        self.running[side] = work
        return True

    def end(self, side: str, lost: bool) -> None:
        work = self.running.pop(side, None)
        if work is None:
            return
        if lost:
            self.queue.give_back(work.batch)
            return
        self.ran[work.batch] += range(work.first, work.end)
        if self.queue.done(work.batch):
            self.finished.append(work.batch)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_every_layer_of_every_batch_is_run_once_and_in_order(data: st.DataObject, layers: int) -> None:
    world = TwoSides(layers)
    for action in data.draw(st.lists(st.sampled_from(["arrive", "load", "new", "old", "end", "lost"]), max_size=60)):
        side = data.draw(st.sampled_from(["new", "old"]))
        if action == "arrive":
            world.ran[f"b{len(world.ran)}"] = []
            world.queue.arrive(f"b{len(world.ran) - 1}")
        elif action == "load":
            world.queue.load(min(layers, world.queue.loaded + 1))
        elif action in ("end", "lost"):
            world.end(side, action == "lost")
        else:
            world.ask(action)
    for side in ("new", "old"):
        world.end(side, False)
    while world.ask("old"):
        world.end("old", False)
    assert list(world.queue) == []
    assert all(ran == list(range(layers)) for ran in world.ran.values())
    assert sorted(world.finished) == sorted(world.ran)


def test_the_new_side_comes_back_to_the_oldest_when_a_layer_is_there() -> None:
    queue = ZigZagQueue(3)
    for name in ("a", "b"):
        queue.arrive(name)
    assert queue.for_new() is None, "no layer is there"
    queue.load(1)
    for name in ("a", "b"):
        assert queue.for_new() == ZigZagWork(name, 0, 1)
        assert not queue.done(name)
    assert queue.for_new() is None
    queue.load(2)
    queue.arrive("c")
    assert queue.for_old() == ZigZagWork("a", 1, 3)
    assert queue.for_new() == ZigZagWork("b", 1, 2)
    assert queue.done("a")
    assert list(queue) == ["b", "c"]


def test_what_cannot_be_is_refused() -> None:
    queue = ZigZagQueue(2)
    queue.arrive("a")
    with pytest.raises(ValueError, match="here already"):
        queue.arrive("a")
    queue.load(1)
    with pytest.raises(ValueError, match=r"\[1, 2\], got 0"):
        queue.load(0)
    with pytest.raises(ValueError, match="at least 1"):
        ZigZagQueue(0)
    with pytest.raises(ValueError, match="order of their arrival"):
        finish_pair(PairRule.STOP, [PairedBatch("a", 2.0, 1.0), PairedBatch("b", 1.0, 1.0)], 2, 1.0)


@pytest.mark.parametrize("load_s", [1.0, 6.0])
def test_the_program_for_arrivals_is_that_for_waiting_batches_when_all_wait(load_s: float) -> None:
    assert arriving_program_mean_s([0.0] * 5, 7, load_s) == pytest.approx(program_mean_s(5, 7, load_s), rel=1e-3)


@pytest.mark.parametrize(("times", "load_s"), [(1.3, 6.0), (1.8, 3.0)])
def test_batches_that_arrive_stay_a_tenth_longer_than_by_the_program_at_most(times: float, load_s: float) -> None:
    batches = evenly(8, 7, times)
    came_s = sum(b.arrival_s for b in batches) / len(batches)
    best_s = arriving_program_mean_s([b.arrival_s for b in batches], 7, load_s) - came_s
    assert mean_s(PairRule.ZIGZAG, batches, 7, load_s) - came_s <= 1.1 * best_s


@settings(max_examples=100, deadline=None)
@given(
    gaps=st.lists(st.floats(0.0, 12.0), min_size=1, max_size=12),
    layers=st.integers(1, 9),
    load_s=st.floats(0.01, 9.0),
)
def test_as_many_are_finished_as_by_the_old_instance_alone_but_for_one_that_it_has_begun(
    gaps: list[float], layers: int, load_s: float
) -> None:
    """It may have begun a younger batch while the oldest had a layer run beside it."""
    batches = [PairedBatch(f"b{i}", sum(gaps[: i + 1]), 1.0) for i in range(len(gaps))]
    free_s, alone = 0.0, []
    for batch in batches:
        free_s = max(free_s, batch.arrival_s) + layers
        alone.append(free_s)
    paired = sorted(finish_pair(PairRule.ZIGZAG, batches, layers, load_s).values())
    assert all(one <= other + layers + 1e-6 for one, other in zip(paired, alone, strict=True))
