"""Moore-Hodgson against brute force and against the paper's listing."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.admission import moore_hodgson

jobs_up_to = lambda n: st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=n)  # noqa: E731


def _on_time_in(order: tuple[tuple[int, int], ...], start: int) -> int:
    """How many jobs (deadline, exec) finish in time when run in this order, late ones last."""
    now, count = start, 0
    for deadline, exec_ in order:
        if now + exec_ <= deadline:
            now += exec_
            count += 1
    return count


def _listing(jobs: list[tuple[int, int]], start: int) -> list[int]:
    """Algorithm 2 as printed: scan for the longest request of the schedule."""
    order = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    schedule: list[int] = []
    now = start
    for i in order:
        schedule.append(i)
        now += jobs[i][1]
        if now > jobs[i][0]:
            longest = max(schedule, key=lambda j: (jobs[j][1], order.index(j)))
            schedule.remove(longest)
            now -= jobs[longest][1]
    return schedule


def _split(jobs: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    return [float(d) for d, _ in jobs], [float(e) for _, e in jobs]


@given(jobs_up_to(6), st.integers(0, 10))
def test_no_order_has_more_on_time_jobs(jobs: list[tuple[int, int]], start: int) -> None:
    schedule = moore_hodgson(*_split(jobs), float(start))
    best = max((_on_time_in(order, start) for order in permutations(jobs)), default=0)
    assert len(schedule.on_time) == best


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=7, max_size=10), st.integers(0, 10))
def test_no_subset_of_ten_is_larger(jobs: list[tuple[int, int]], start: int) -> None:
    """For one machine a set of jobs is feasible exactly if deadline order makes it."""
    by_deadline = sorted(jobs)
    best = 0
    for subset in range(1 << len(jobs)):
        now, feasible = start, True
        for i, (deadline, exec_) in enumerate(by_deadline):
            if subset >> i & 1:
                now += exec_
                feasible = feasible and now <= deadline
        best = max(best, subset.bit_count()) if feasible else best
    assert len(moore_hodgson(*_split(jobs), float(start)).on_time) == best


@given(jobs_up_to(60), st.integers(0, 10))
def test_same_schedule_as_the_listing(jobs: list[tuple[int, int]], start: int) -> None:
    assert moore_hodgson(*_split(jobs), float(start)).on_time == _listing(jobs, start)


@given(jobs_up_to(60), st.integers(0, 10))
def test_schedule_is_feasible_and_complete(jobs: list[tuple[int, int]], start: int) -> None:
    schedule = moore_hodgson(*_split(jobs), float(start))
    assert sorted(schedule.on_time + schedule.late) == list(range(len(jobs)))
    now = start
    for i in schedule.on_time:
        now += jobs[i][1]
        assert now <= jobs[i][0]
    for part in (schedule.on_time, schedule.late):
        assert [jobs[i][0] for i in part] == sorted(jobs[i][0] for i in part)
