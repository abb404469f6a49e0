"""Which waiting requests can still be on time, and in which order to run them: Moore-Hodgson (Prism, Algorithm 2).

The device is one machine, a request one job: execution time ``e = p / c`` (prompt tokens over prefill speed), due at
``a + s``. The schedule holds the largest possible number of on-time jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop


@dataclass(frozen=True, slots=True)
class AdmissionOrder:
    """Indices into the given jobs: the on-time ones and the late ones, each by deadline (ties: given order)."""

    on_time: list[int]
    late: list[int]


def moore_hodgson(deadlines_s: Sequence[float], execs_s: Sequence[float], start_s: float) -> AdmissionOrder:
    """The schedule with the fewest late jobs when the machine is free from ``start_s`` on.

    ``deadlines_s`` and ``execs_s`` run in parallel, one entry per job; times >= 0. O(n log n): the longest job of the
    schedule is found with a heap instead of the listing's scan. Of equally long jobs the one due last is given up.
    """
    order = sorted(range(len(deadlines_s)), key=deadlines_s.__getitem__)
    longest: list[tuple[float, int]] = []  # (-exec, -position in order) of the jobs in the schedule
    given_up = bytearray(len(order))
    now_s = start_s
    for position, job in enumerate(order):
        exec_s = execs_s[job]
        now_s += exec_s
        if now_s > deadlines_s[job]:
            negative_s, negative_position = heappushpop(longest, (-exec_s, -position))
            given_up[-negative_position] = 1
            now_s += negative_s
        else:
            heappush(longest, (-exec_s, -position))
    return AdmissionOrder(
        [job for position, job in enumerate(order) if not given_up[position]],
        [job for position, job in enumerate(order) if given_up[position]],
    )
