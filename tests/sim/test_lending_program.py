"""The integer program against brute force, and what stands when the search or the solver finds more."""

from __future__ import annotations

import random

import pytest

from prism.core.errors import InvalidValue
from prism.policy.lending_map import Servers, imbalance_bytes
from prism.sim.lending_program import GOOD_ENOUGH, plan_lending, solve_program
from tests.policy.test_lending_map import GPU, best_by_force, fits, needs_of


@pytest.mark.parametrize("seed", range(8))
def test_the_program_finds_what_brute_force_finds(seed: int) -> None:
    draw = random.Random(seed)
    servers = Servers(draw.choice([2, 3]), 3, GPU)
    spares = [draw.choice([-40, -25, -10, 0, 15, 30, 55]) for _ in range(5)]
    needs = needs_of((2, spares[0]), *((1, spare) for spare in spares[1:]))
    best = best_by_force(needs, servers)
    solved = solve_program(needs, servers, limit_s=20.0)
    assert solved is not None
    assert fits(needs, solved.at, servers)
    assert solved.imbalance_bytes == imbalance_bytes(needs, solved.at, servers)
    assert solved.bound_bytes <= best <= solved.imbalance_bytes <= best + GOOD_ENOUGH * max(abs(best), GPU)
    plan = plan_lending(needs, servers, limit_s=20.0)
    assert plan.bound_bytes <= best <= plan.imbalance_bytes <= best + GOOD_ENOUGH * max(abs(best), GPU)


def test_a_fleet_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidValue, match="servers"):
        plan_lending(needs_of(*[(1, 5)] * 5), Servers(1, 4, GPU))


def test_wide_models_that_fit_in_number_but_not_beside_each_other_are_refused() -> None:
    with pytest.raises(InvalidValue, match="no assignment"):
        plan_lending(needs_of(*[(2, 5)] * 4), Servers(3, 3, GPU))
