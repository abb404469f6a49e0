"""Requests that never end, and such as never could: they count, and they do not keep others from ending."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.sim.models import known_spec
from prism.sim.recorder import NEVER_ENDED
from prism.trace.row import TraceRow
from tests.sim.helpers import h100s, run, tiny_spec

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def test_requests_that_never_end_are_missed_and_counted() -> None:
    """The only device is lost, so that nothing ever takes the second request; a bound on waiting does not end it."""
    models = (replace(tiny_spec("m", slo_ttft_s=5.0), max_wait_s=1e9),)
    rows = [TraceRow(0.0, "m", 100, 5), TraceRow(20.0, "m", 100, 5)]
    faults = [{"at": "10s", "kind": "gpu_fails", "target": "node0/cuda:0"}]
    result, _ = run(h100s(1, faults=faults), models, rows)
    group = result.report.all
    assert group.attainment.requests == 2, "the one that never ended is no less a request"
    assert group.attainment.ttft == group.attainment.both == 0.5
    assert group.errors == {NEVER_ENDED: 1}
    assert result.stats.never_ended == 1


@pytest.mark.parametrize("policy", ["muxserve", "static"])
def test_a_prompt_too_large_for_what_fixed_weights_leave_does_not_block_its_model(policy: str) -> None:
    """Two models on one device for good: beside both there is no room for the first prompt, which the weights of its
    own model alone would leave."""
    models = tuple(known_spec(f"m{i}", LLAMA, 5.0, 1.0) for i in range(2))
    rows = [TraceRow(0.0, "m0", 100_000, 5), TraceRow(0.5, "m0", 100, 5), TraceRow(0.6, "m1", 100, 5)]
    result, _ = run(h100s(1, memory="41GiB"), models, rows, policy)
    errors = {r.row: r.error for r in result.world.recorder.records}
    assert errors == {0: "too_large", 1: "", 2: ""}


def test_where_weights_may_leave_the_same_prompt_is_served() -> None:
    models = tuple(known_spec(f"m{i}", LLAMA, 5.0, 1.0) for i in range(2))
    rows = [TraceRow(0.0, "m1", 100, 5), TraceRow(5.0, "m0", 100_000, 5)]
    result, _ = run(h100s(1, memory="41GiB"), models, rows, "prism")
    assert not [r.error for r in result.world.recorder.records if r.error]
