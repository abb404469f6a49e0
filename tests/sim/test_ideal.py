"""benchmarks/sim/ideal.py: what the GPUs of a comparison could do."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.sim.ideal import ideal
from benchmarks.sim.workloads import catalog, h100_cluster
from prism.core.specs import ModelSpec
from prism.trace.row import TraceRow

SMALL = "meta-llama/Llama-3.1-8B-Instruct"
LARGE = "meta-llama/Llama-3.3-70B-Instruct"


def models(*mix: tuple[str, int, int]) -> tuple[ModelSpec, ...]:
    """Whose objectives are about twice what a token takes alone."""
    tight = {SMALL: 0.017, LARGE: 0.034}
    return tuple(replace(m, slo_ttft_s=0.15, slo_tpot_s=tight[m.path]) for m in catalog(mix))


def in_turn(found: tuple[ModelSpec, ...], every_s: float, each: int = 1) -> list[TraceRow]:
    return [TraceRow(every_s * i, str(m.name), 200, 200) for i, m in enumerate(found * each)]


def test_memory_does_not_bind_and_answers_of_a_model_share_its_steps() -> None:
    found = models((SMALL, 2, 1))
    assert ideal(h100_cluster(1), found, in_turn(found, 0.02, each=60)) == 1.0


def test_bandwidth_binds_and_more_gpus_serve_more() -> None:
    found = models((SMALL, 20, 1))
    rows = in_turn(found, 0.01)
    one, two, eight = (ideal(h100_cluster(gpus), found, rows) for gpus in (1, 2, 8))
    assert 0.0 < one < two < eight == 1.0
    assert two <= 2 * one + 0.05


def test_models_that_take_most_for_a_request_are_left_out_where_that_serves_more() -> None:
    found = models((LARGE, 2, 4), (SMALL, 8, 1))
    large = [m for m in found if m.path == LARGE]
    rows = [TraceRow(0.0, str(m.name), 200, 400) for m in large]
    rows += [TraceRow(0.1, str(m.name), 200, 200) for m in found if m.path == SMALL]
    assert ideal(h100_cluster(4), found, rows) >= 0.8


def test_an_answer_that_is_too_slow_alone_is_not_served() -> None:
    found = tuple(replace(m, slo_tpot_s=0.004) for m in models((SMALL, 1, 1)))
    assert ideal(h100_cluster(8), found, in_turn(found, 0.01)) == 0.0
