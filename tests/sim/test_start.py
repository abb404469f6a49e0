"""Warm or cold, alike for every policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prism.core.settings import PolicyName
from prism.sim.expected import expect
from prism.trace.row import TraceRow
from tests.sim.helpers import h100s, llamas, run

POLICIES = [p.value for p in PolicyName]
ROWS = [TraceRow(2.0 + i, f"m{i % 2}", 100, 5) for i in range(6)]


def loads(log: Sequence[dict[str, object]]) -> list[float]:
    return [float(str(line["at_s"])) for line in log if line["do"] == "Activate"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_warm_start_has_loaded_what_fits_before_the_trace_begins(policy: str) -> None:
    _, log = run(h100s(2), llamas(2), ROWS, policy, preload_share=1.0)
    assert len(loads(log)) == 2
    assert all(at_s < 30.0 for at_s in loads(log))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cold_start_has_loaded_nothing(policy: str) -> None:
    result, log = run(h100s(2), llamas(2), ROWS, policy, preload_share=1.0, cold=True)
    assert min(loads(log)) >= 30.0
    assert not [r.error for r in result.world.recorder.records if r.error]


def test_a_trace_says_what_to_expect() -> None:
    rows = [TraceRow(0.0, "a", 100, 10), TraceRow(5.0, "a", 300, None), TraceRow(10.0, "b", None, 30)]
    found = expect(rows, (512, 128))
    assert found.rates == {"a": 0.2, "b": 0.1}
    assert found.prompt_tokens == {"a": 200.0, "b": 512.0}
    assert found.output_tokens == {"a": 69.0, "b": 30.0}
