"""AQUA's placement as the integer program it is (section 5, equations 1 to 6), solved with HiGHS.

Equal models are interchangeable and so are servers, so that the variables count *how many of each kind of model* stand
on each server, and the first server is the one with the most net memory: without that a solver proves the same bound
once per permutation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from prism.core.errors import InvalidValue
from prism.policy.lending_map import (
    Assignment,
    MemoryNeed,
    Servers,
    assign_in_turn,
    check_fits,
    imbalance_bytes,
    least_count,
    least_imbalance_bytes,
)
from prism.policy.lending_search import improve
from prism.sim.lending_bound import bound_by_types

Counts = npt.NDArray[np.int_]
"""How many of each kind of model stand on each server, kind by kind."""
GOOD_ENOUGH: Final = 0.02
"""The paper's goal: within this share of the optimum."""
_SHARE: Final = 0.7
"""Of the time that is left goes to the next count."""


@dataclass(frozen=True)
class LendingPlan:
    """An assignment and how good it is known to be."""

    at: Assignment
    imbalance_bytes: int
    bound_bytes: float
    """No assignment is better than this."""
    solver: str
    """What found it: ``local search`` or ``program``."""
    scale_bytes: float
    """What :attr:`gap` is a share of: the bound, or a device's memory where lenders and borrowers could be level."""

    @property
    def gap(self) -> float:
        """How far above the best it lies at most."""
        return max(0.0, self.imbalance_bytes - self.bound_bytes) / self.scale_bytes


@dataclass(frozen=True)
class _Kind:
    shards: int
    spare_bytes: int

    @property
    def sign(self) -> int:
        return (self.spare_bytes > 0) - (self.spare_bytes < 0)


def plan_lending(needs: Sequence[MemoryNeed], servers: Servers, limit_s: float = 5.0) -> LendingPlan:
    """Servers for ``needs``. The local search answers when it proves itself within :data:`GOOD_ENOUGH`, else the
    program has what is left of ``limit_s`` seconds and the better of the two stands. Raises :class:`InvalidValue`."""
    check_fits(needs, servers)
    start_s = time.perf_counter()
    found = _searched(needs, servers)
    if found is not None and found.gap <= GOOD_ENOUGH:
        return found
    left_s = limit_s - (time.perf_counter() - start_s)
    solved = solve_program(needs, servers, left_s) if left_s > 0 else None
    plans = [plan for plan in (found, solved) if plan is not None]
    if not plans:
        raise InvalidValue("servers", servers.count, f"no assignment was found within {limit_s:g} s")
    best = min(plans, key=lambda plan: plan.imbalance_bytes)
    bound = max(plan.bound_bytes for plan in plans)
    return _plan(best.at, best.imbalance_bytes, min(bound, best.imbalance_bytes), best.solver, servers)


def _plan(at: Assignment, imbalance: int, bound_bytes: float, solver: str, servers: Servers) -> LendingPlan:
    return LendingPlan(at, imbalance, bound_bytes, solver, max(abs(bound_bytes), servers.gpu_bytes))


def _searched(needs: Sequence[MemoryNeed], servers: Servers) -> LendingPlan | None:
    first = assign_in_turn(needs, servers)
    if first is None:
        return None
    at = improve(needs, first, servers)
    imbalance = imbalance_bytes(needs, at, servers)
    found = _plan(at, imbalance, least_imbalance_bytes(needs, servers), "local search", servers)
    if found.gap <= GOOD_ENOUGH:
        return found
    return _plan(at, imbalance, bound_by_types(needs, servers, imbalance), "local search", servers)


def solve_program(needs: Sequence[MemoryNeed], servers: Servers, limit_s: float) -> LendingPlan | None:
    """The best assignment HiGHS has after ``limit_s``, with a bound; None: it has none yet.

    One lender more than borrowers weighs as much as a device's memory, so that the best plan nearly always has the
    smallest largest count that is possible: counts are tried upward, each with a program that minimises the largest net
    memory alone. (In one program the two maxima hide each other's bounds.)
    """
    kinds = list(dict.fromkeys(_Kind(n.shards, n.spare_bytes) for n in needs))
    counts = Counter(_Kind(n.shards, n.spare_bytes) for n in needs)
    mean_bytes = sum(n.shards * n.spare_bytes for n in needs) / servers.count
    best: LendingPlan | None = None
    bounds: list[float] = []
    for most in range(least_count(needs, servers), servers.gpus + 1):
        floor_bytes = mean_bytes + servers.gpu_bytes * most
        if best is not None and best.imbalance_bytes <= floor_bytes:
            break
        solved = _solve(kinds, counts, servers, most, limit_s * _SHARE)
        limit_s *= 1 - _SHARE
        if solved is _IMPOSSIBLE:
            continue
        bounds.append(
            floor_bytes if solved is None else max(floor_bytes, solved.bound_bytes + servers.gpu_bytes * most)
        )
        if solved is not None:
            at = _dealt(needs, kinds, solved.x, servers)
            found = imbalance_bytes(needs, at, servers)
            if best is None or found < best.imbalance_bytes:
                best = _plan(at, found, 0.0, "program", servers)
    if best is None:
        return None
    return _plan(best.at, best.imbalance_bytes, min(*bounds, best.imbalance_bytes), best.solver, servers)


@dataclass(frozen=True)
class _Solved:
    x: Counts
    bound_bytes: float


_IMPOSSIBLE: Final = _Solved(np.zeros(0, dtype=np.int_), 0.0)
"""No assignment keeps to the count."""
_INFEASIBLE: Final = 2
"""HiGHS's status for it, as scipy passes it on."""


def _solve(
    kinds: Sequence[_Kind], counts: Counter[_Kind], servers: Servers, most: int, limit_s: float
) -> _Solved | None:
    """The least largest net memory of a server when lenders outnumber borrowers by ``most`` at the most; None: nothing
    was found in time."""
    variables = len(kinds) * servers.count + 1
    cost = np.zeros(variables)
    cost[-1] = 1.0
    upper = np.full(variables, np.inf)
    for k, kind in enumerate(kinds):
        upper[k * servers.count : (k + 1) * servers.count] = counts[kind]
    result = milp(
        cost,
        integrality=np.append(np.ones(variables - 1), 0),
        bounds=Bounds(np.zeros(variables), upper),
        constraints=_constraints(kinds, counts, servers, most),
        options={"time_limit": limit_s, "mip_rel_gap": GOOD_ENOUGH / 4 / servers.gpus},
    )
    if result.status == _INFEASIBLE:
        return _IMPOSSIBLE
    if result.x is None:
        return None
    bound = (float(result.mip_dual_bound) - servers.gpus) * servers.gpu_bytes
    return _Solved(np.rint(result.x).astype(np.int_), bound)


def _constraints(kinds: Sequence[_Kind], counts: Counter[_Kind], servers: Servers, most: int) -> list[LinearConstraint]:
    """The last variable is the largest net memory, in devices' memory and so many devices up that it is never negative
    (HiGHS's tolerance is relative)."""
    count, last = servers.count, len(kinds) * servers.count
    placed = lil_array((len(kinds), last + 1))
    devices, memory, number = (lil_array((count, last + 1)) for _ in range(3))
    ordered = lil_array((max(count - 1, 1), last + 1))
    for k, kind in enumerate(kinds):
        placed[k, k * count : (k + 1) * count] = 1.0
        weight = kind.shards * kind.spare_bytes / servers.gpu_bytes
        for s in range(count):
            at = k * count + s
            devices[s, at], memory[s, at], number[s, at] = kind.shards, weight, kind.shards * kind.sign
            if s:
                ordered[s - 1, k * count], ordered[s - 1, at] = weight, -weight
    memory[:, last] = -1.0
    all_of_them = np.array([counts[kind] for kind in kinds], dtype=float)
    return [
        LinearConstraint(placed.tocsr(), all_of_them, all_of_them),
        LinearConstraint(devices.tocsr(), -np.inf, float(servers.gpus)),
        LinearConstraint(memory.tocsr(), -np.inf, -float(servers.gpus)),
        LinearConstraint(number.tocsr(), -np.inf, float(most)),
        LinearConstraint(ordered.tocsr(), 0.0, np.inf),
    ]


def _dealt(needs: Sequence[MemoryNeed], kinds: Sequence[_Kind], x: Counts, servers: Servers) -> Assignment:
    """Which model goes where, from how many of its kind do."""
    queues = {
        kind: [s for s in range(servers.count) for _ in range(int(x[k * servers.count + s]))]
        for k, kind in enumerate(kinds)
    }
    return [queues[_Kind(need.shards, need.spare_bytes)].pop() for need in needs]
