"""A burst of one model is noticed, and answered with all the instances it needs, within a fraction of a second."""

from __future__ import annotations

import pytest

from benchmarks.sim.burst import run


@pytest.mark.parametrize("name", ["8B", "14B"])
def test_a_burst_gets_its_instances_at_once(name: str) -> None:
    """All are ordered within half a second of its beginning, and what queued up until they serve is shared out."""
    ideal, found = (run(name, policy, 10.0, 1) for policy in ("ideal", "without standing"))
    assert len(found.served_after_s) == 7
    assert found.served_after_s[0] < ideal.load_s + 0.5
    assert found.p99_s <= 1.5 * ideal.p99_s + found.load_s + 0.5
