"""Memory on demand in the simulator: an idle neighbour makes room as soon as it is missed."""

from __future__ import annotations

import pytest

from prism.trace.row import TraceRow
from tests.sim.helpers import h100s, run, tiny_spec


@pytest.mark.parametrize("report_every", ["1s", "5s"])
@pytest.mark.parametrize("begins_s", [40.0, 40.3, 40.7])
def test_it_leaves_within_a_moment_wherever_reports_fall(report_every: str, begins_s: float) -> None:
    """``b`` is loaded and idle when 60 requests for ``a`` need more KV than is left beside both."""
    models = (tiny_spec("a"), tiny_spec("b"))
    cluster = h100s(1, memory="512MiB", timing={"report_every": report_every})
    rows = [TraceRow(0.0, "b", 50, 5), TraceRow(0.1, "a", 50, 5)]
    rows += [TraceRow(begins_s + 0.001 * i, "a", 500, 400) for i in range(60)]
    result, log = run(cluster, models, rows)
    offset_s = result.world.recorder.offset_s
    left_s = [float(x["at_s"]) - offset_s for x in log if x["do"] == "Deactivate" and x["model"] == "b"]  # type: ignore[arg-type]
    assert left_s and begins_s < left_s[0] < begins_s + 1.0
