"""Rivals do what they can: what a policy of theirs costs them is no constant of ours."""

from __future__ import annotations

from tests.sim.helpers import h100s, llamas, random_rows, run


def test_qlm_spends_its_time_on_answers_and_not_on_swaps() -> None:
    """Of more models than devices, all asked more than they can do. What was running when a model leaves is prefilled
    again: with a quantum of a few swaps the fleet did little else."""
    models = llamas(6)
    rows = random_rows([spec.name for spec in models], seed=3, count=3000, span_s=60.0, output=400)
    swapped, swaps = run(h100s(3), models, rows, "qlm")
    assert sum(line["do"] == "Activate" for line in swaps) > 3, "models have to take turns"
    shared, _ = run(h100s(3), models, rows, "muxserve")
    assert swapped.stats.simulated_s < 1.5 * shared.stats.simulated_s
