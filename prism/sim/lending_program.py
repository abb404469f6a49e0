"""AQUA's placement as the integer program it is (section 5, equations 1 to 6), solved with HiGHS.

Equal models are interchangeable and so are servers, so that the variables count *how many of each kind of model* stand
on each server, and the first server is the one with the most net memory: without that a solver proves the same bound
once per permutation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
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
    improve,
    least_imbalance_bytes,
)

GOOD_ENOUGH: Final = 0.02
"""The paper's goal: within this share of the optimum."""


@dataclass(frozen=True)
class LendingPlan:
    """An assignment and how good it is known to be."""

    at: Assignment
    imbalance_bytes: int
    bound_bytes: float
    """No assignment is better than this."""
    solver: str
    """What found it: ``local search`` or ``program``."""

    @property
    def gap(self) -> float:
        """How far above the bound it may lie, as a share of it."""
        return max(0.0, self.imbalance_bytes - self.bound_bytes) / max(abs(self.bound_bytes), 1.0)


@dataclass(frozen=True)
class _Kind:
    shards: int
    spare_bytes: int

    @property
    def sign(self) -> int:
        return (self.spare_bytes > 0) - (self.spare_bytes < 0)


def plan_lending(needs: Sequence[MemoryNeed], servers: Servers, limit_s: float = 5.0) -> LendingPlan:
    """Servers for ``needs``. The local search answers when it proves itself within :data:`GOOD_ENOUGH`, else the program
    has ``limit_s`` seconds and the better of the two stands. Raises :class:`InvalidValue` when they do not fit."""
    check_fits(needs, servers)
    found = _searched(needs, servers)
    if found is not None and found.gap <= GOOD_ENOUGH:
        return found
    solved = solve_program(needs, servers, limit_s)
    plans = [plan for plan in (found, solved) if plan is not None]
    if not plans:
        raise InvalidValue("servers", servers.count, f"no assignment was found within {limit_s:g} s")
    best = min(plans, key=lambda plan: plan.imbalance_bytes)
    bound = max(plan.bound_bytes for plan in plans)
    return LendingPlan(best.at, best.imbalance_bytes, min(bound, best.imbalance_bytes), best.solver)


def _searched(needs: Sequence[MemoryNeed], servers: Servers) -> LendingPlan | None:
    first = assign_in_turn(needs, servers)
    if first is None:
        return None
    at = improve(needs, first, servers)
    return LendingPlan(at, imbalance_bytes(needs, at, servers), least_imbalance_bytes(needs, servers), "local search")


def solve_program(needs: Sequence[MemoryNeed], servers: Servers, limit_s: float) -> LendingPlan | None:
    """The best assignment HiGHS has after ``limit_s``, with its own bound; None: it has none yet."""
    kinds = list(dict.fromkeys(_Kind(n.shards, n.spare_bytes) for n in needs))
    counts = Counter(_Kind(n.shards, n.spare_bytes) for n in needs)
    variables = len(kinds) * servers.count + 2
    largest, most = variables - 2, variables - 1  # the two maxima of the objective, in devices' memory and in devices
    cost = np.zeros(variables)
    cost[largest] = cost[most] = 1.0
    upper = np.full(variables, np.inf)
    for k, kind in enumerate(kinds):
        upper[k * servers.count : (k + 1) * servers.count] = counts[kind]
    lower = np.where(np.arange(variables) >= largest, -np.inf, 0.0)
    whole = np.where(np.arange(variables) == largest, 0, 1)
    result = milp(
        cost,
        integrality=whole,
        bounds=Bounds(lower, upper),
        constraints=_constraints(kinds, counts, servers, variables),
        options={"time_limit": limit_s, "mip_rel_gap": GOOD_ENOUGH / 4},
    )
    if result.x is None:
        return None
    at = _dealt(needs, kinds, np.rint(result.x).astype(int), servers)
    bound = max(float(result.mip_dual_bound) * servers.gpu_bytes, least_imbalance_bytes(needs, servers))
    return LendingPlan(at, imbalance_bytes(needs, at, servers), bound, "program")


def _constraints(
    kinds: Sequence[_Kind], counts: Counter[_Kind], servers: Servers, variables: int
) -> list[LinearConstraint]:
    count, largest, most = servers.count, variables - 2, variables - 1
    placed = lil_array((len(kinds), variables))
    devices = lil_array((count, variables))
    memory = lil_array((count, variables))
    number = lil_array((count, variables))
    for k, kind in enumerate(kinds):
        placed[k, k * count : (k + 1) * count] = 1.0
        for s in range(count):
            at = k * count + s
            devices[s, at] = kind.shards
            memory[s, at] = kind.shards * kind.spare_bytes / servers.gpu_bytes
            number[s, at] = kind.shards * kind.sign
    memory[:, largest] = -1.0
    number[:, most] = -1.0
    all_of_them = np.array([counts[kind] for kind in kinds], dtype=float)
    ordered = lil_array((max(count - 1, 1), variables))
    for s in range(1, count):
        for k, kind in enumerate(kinds):
            weight = kind.shards * kind.spare_bytes / servers.gpu_bytes
            ordered[s - 1, k * count] = weight
            ordered[s - 1, k * count + s] = -weight
    return [
        LinearConstraint(placed.tocsr(), all_of_them, all_of_them),
        LinearConstraint(devices.tocsr(), -np.inf, float(servers.gpus)),
        LinearConstraint(memory.tocsr(), -np.inf, 0.0),
        LinearConstraint(number.tocsr(), -np.inf, 0.0),
        LinearConstraint(ordered.tocsr(), 0.0, np.inf),
    ]


def _dealt(
    needs: Sequence[MemoryNeed], kinds: Sequence[_Kind], x: np.ndarray[tuple[int], np.dtype[np.int_]], servers: Servers
) -> Assignment:
    """Which model goes where, from how many of its kind do."""
    queues = {
        kind: [s for s in range(servers.count) for _ in range(int(x[k * servers.count + s]))]
        for k, kind in enumerate(kinds)
    }
    return [queues[_Kind(need.shards, need.spare_bytes)].pop() for need in needs]
