"""Routing: requests go where the least is, and where one waits there is no room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.routing import WAITING_WEIGHS, least_loaded, queue_load

queues = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=4)


@given(queues, st.integers(0, 100))
def test_a_batch_fills_the_queues_evenly(counts: list[tuple[int, int]], requests: int) -> None:
    """As water does: none that took a request is loaded by more than a request above any other."""
    running = [runs for _, runs in counts]
    unfinished = [runs + waits for waits, runs in counts]
    before = list(unfinished)
    for _ in range(requests):
        unfinished[least_loaded(range(len(counts)), lambda i: queue_load(unfinished[i], running[i]))] += 1
    loads = [queue_load(n, runs) for n, runs in zip(unfinished, running, strict=True)]
    for was, now, load in zip(before, unfinished, loads, strict=True):
        assert now == was or load <= min(loads) + 1 + WAITING_WEIGHS


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50))
def test_one_that_waits_weighs_more_than_several_that_run(running: int, others: int, waiting: int) -> None:
    assert (queue_load(running + waiting, running) < queue_load(others, others)) == (
        running + (1 + WAITING_WEIGHS) * waiting < others
    )


@given(st.integers(0, 50), st.integers(0, 50))
def test_what_is_not_known_or_told_too_late_waits_for_nothing(unfinished: int, more: int) -> None:
    assert queue_load(unfinished, None) == queue_load(unfinished, unfinished + more) == unfinished


@given(st.lists(st.integers(0, 5), min_size=1))
def test_the_first_of_the_least_loaded_is_taken(loads: list[int]) -> None:
    assert least_loaded(range(len(loads)), loads.__getitem__) == loads.index(min(loads))
