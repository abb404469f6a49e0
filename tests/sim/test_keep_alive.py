"""Keep-alive in the simulator: the same moment wherever reports fall."""

from __future__ import annotations

import pytest

from prism.trace.row import TraceRow
from tests.sim.helpers import h100s, run, tiny_spec

KEEP_S = 4.0
PHASES = (0.0, 0.11, 0.37, 0.5, 0.76, 0.93)


def lives(pause_s: float, begins_s: float, report_every: str, keep_s: float = KEEP_S) -> list[tuple[str, float]]:
    """What happened to ``a``, with seconds since the end of its first request: a second one comes ``pause_s`` after
    it. The busy neighbour makes the device report every second."""
    models = (tiny_spec("a", keep_alive_s=keep_s), tiny_spec("b"))
    cluster = h100s(1, timing={"report_every": report_every, "front": "0s", "deliver": "0s", "command": "0s"})
    busy = [TraceRow(0.3 * i, "b", 50, 5) for i in range(100)]

    def at(*times_s: float) -> list[TraceRow]:
        return sorted([*busy, *(TraceRow(t, "a", 50, 20) for t in times_s)], key=lambda r: r.arrival_s)

    first, _ = run(cluster, models, at(begins_s))
    end_s = next(r.arrival_s + r.e2e_s for r in first.world.recorder.records if r.model == "a")
    _, log = run(cluster, models, at(begins_s, end_s + pause_s))
    return [
        (str(line["do"]), float(line["at_s"]) - first.world.recorder.offset_s - end_s)  # type: ignore[arg-type]
        for line in log
        if line.get("model") == "a" and line["do"] in ("Activate", "Deactivate")
    ]


@pytest.mark.parametrize("report_every", ["1s", "5s"])
@pytest.mark.parametrize("phase_s", PHASES)
def test_a_pause_decides_by_its_length_and_by_nothing_else(phase_s: float, report_every: str) -> None:
    short = lives(KEEP_S - 0.02, 5.0 + phase_s, report_every)
    assert [what for what, _ in short] == ["Activate", "Deactivate"]
    long = lives(KEEP_S + 0.02, 5.0 + phase_s, report_every)
    assert [what for what, _ in long] == ["Activate", "Deactivate"] * 2
    assert long[1][1] == pytest.approx(KEEP_S, abs=2e-3)


def test_a_keep_alive_that_is_shorter_than_the_time_between_reports() -> None:
    assert lives(3.0, 5.2, "1s", 0.3)[1] == ("Deactivate", pytest.approx(0.3, abs=2e-3))
