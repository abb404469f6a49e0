"""The modelled engine of the burst benchmark: prompts in order of arrival, as engines take them, in either way."""

from __future__ import annotations

import pytest

from benchmarks.kv.burst_engine import BATCH_TOKENS, BurstEngine, BurstJob
from prism.sim.gpus import gpu
from prism.sim.models import known_spec
from prism.sim.roofline import step_cost

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize("copy_s", [None, 1e-6], ids=["first come", "fair"])
def test_a_prompt_that_is_begun_goes_on_before_others(copy_s: float | None) -> None:
    cost = step_cost(known_spec(MODEL, MODEL, 1.0, 0.1), gpu("A100"))
    jobs = [BurstJob(str(i), 0.0, 8 * BATCH_TOKENS, 1) for i in range(4)]
    done = BurstEngine(cost, 100_000, copy_s).run(jobs)
    firsts = [job.first_s for job in sorted(done, key=lambda job: job.id)]
    assert firsts == sorted(firsts)
    assert firsts[0] < 0.3 * firsts[-1], "a quarter of the work is done, not nearly all of it"
