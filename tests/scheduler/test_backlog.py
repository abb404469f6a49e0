"""When a queue is reported before its time: after as long as its requests can bear, and again when it has doubled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.core.device_events import EngineUp, Finished, FirstToken, RequestArrived
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import GpuSettings
from prism.scheduler.backlog import Backlog, WaitingLine
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.shortage import LEAVES_S, bearable_wait_s

A, B = ModelName("a"), ModelName("b")
SLO_S = 2.0
KEY = InstanceKey(A, Generation(1))


def test_a_queue_is_told_of_when_it_cannot_bear_its_wait_any_more() -> None:
    backlog = Backlog()
    assert backlog.report_due_s([]) == float("inf")
    assert backlog.report_due_s([WaitingLine(A, 10.0, SLO_S, 3, 0.0)]) == 10.5
    assert backlog.report_due_s([WaitingLine(A, 10.0, 0.01, 3, 0.0)]) == 10.0 + LEAVES_S, (
        "leaving takes that long in any case"
    )
    assert backlog.report_due_s([WaitingLine(A, 10.0, SLO_S, 3, 0.0), WaitingLine(B, 10.0, 1.0, 1, 0.0)]) == 10.25, (
        "whoever can bear least"
    )


def test_a_queue_that_takes_long_to_prefill_is_told_of_at_once() -> None:
    assert Backlog().report_due_s([WaitingLine(A, 10.0, SLO_S, 3, 0.6)]) == 10.0
    assert Backlog().report_due_s([WaitingLine(A, 10.0, SLO_S, 3, 0.4)]) == 10.5


def test_a_burst_behind_another_report_is_told_of_almost_at_once() -> None:
    """That of an engine which just came up, before what waited for it was there."""
    backlog = Backlog()
    backlog.note_report([], 10.0)
    assert backlog.report_due_s([WaitingLine(A, 10.01, SLO_S, 40, 5.0)]) == 10.05
    backlog.note_report([WaitingLine(A, 10.01, SLO_S, 40, 5.0)], 10.05)
    assert backlog.report_due_s([WaitingLine(A, 10.01, SLO_S, 90, 9.0)]) == 10.3


def test_it_is_told_of_again_only_when_it_has_doubled() -> None:
    backlog = Backlog()
    backlog.note_report([WaitingLine(A, 10.0, SLO_S, 3, 0.0)], 10.4)
    assert backlog.report_due_s([WaitingLine(A, 10.0, SLO_S, 3, 0.0)]) == 10.5, "it could bear its wait then"
    backlog.note_report([WaitingLine(A, 10.0, SLO_S, 3, 0.0)], 10.65)
    assert backlog.report_due_s([WaitingLine(A, 10.0, SLO_S, 5, 0.0)]) == float("inf")
    assert backlog.report_due_s([WaitingLine(A, 10.0, SLO_S, 6, 0.0)]) == 10.9
    backlog.note_report([], 11.0)
    assert backlog.report_due_s([WaitingLine(A, 12.0, SLO_S, 1, 0.0)]) == 12.5, "a new queue"


@given(st.lists(st.tuples(st.floats(0.001, 0.5), st.integers(0, 40)), min_size=1, max_size=80))
def test_reports_keep_their_distance_and_no_long_wait_stays_untold(steps: list[tuple[float, int]]) -> None:
    backlog, now_s, since_s, told_s, told = Backlog(), 0.0, None, float("-inf"), 0
    for pause_s, count in steps:
        now_s += pause_s
        since_s = (since_s if since_s is not None else now_s) if count else None
        lines = [] if since_s is None else [WaitingLine(A, since_s, SLO_S, count, 0.0)]
        told = told if count else 0
        if backlog.report_due_s(lines) <= now_s:
            assert since_s is not None and now_s - since_s >= bearable_wait_s(SLO_S) - 1e-9
            assert now_s - told_s >= 0.25 - 1e-9
            assert count >= 2 * told
            backlog.note_report(lines, now_s)
            told_s, told = now_s, count
        elif since_s is not None and now_s >= since_s + bearable_wait_s(SLO_S) and now_s >= told_s + 0.25:
            assert count < 2 * told


def _scheduler() -> GpuScheduler:
    scheduler = GpuScheduler(DeviceId("n/host:0"), GpuSettings())
    scheduler.on_event(EngineUp(KEY, 1000.0, 1, max_running=1), 0.0)
    return scheduler


def _arrive(scheduler: GpuScheduler, id: str, at_s: float) -> None:
    scheduler.on_event(RequestArrived(Request(RequestId(id), A, at_s, 10, SLO_S, 60.0)), at_s)


def test_a_device_says_how_long_a_model_has_made_requests_wait() -> None:
    scheduler = _scheduler()
    _arrive(scheduler, "first", 1.0)
    assert scheduler.backlog_due_s() == float("inf")
    _arrive(scheduler, "second", 2.0)
    assert scheduler.times(KEY, 2.5).waited_s == 0.5
    assert scheduler.backlog_due_s() == 2.5
    scheduler.note_report(2.5)
    assert scheduler.backlog_due_s() == float("inf")
    _arrive(scheduler, "third", 2.6)
    assert scheduler.backlog_due_s() == 2.75


def test_a_device_measures_what_a_token_takes() -> None:
    """Nine tokens after the first in 0.9 s; an older attempt's tokens do not count."""
    scheduler = _scheduler()
    _arrive(scheduler, "first", 1.0)
    scheduler.on_event(FirstToken(RequestId("first")), 1.1)
    scheduler.on_event(Finished(RequestId("first"), 10), 2.0)
    assert abs(scheduler.times(KEY, 2.0).token_s - 0.1) < 1e-9
    resumed = Request(RequestId("second"), A, 2.0, 10, SLO_S, 60.0, generated_tokens=100)
    scheduler.on_event(RequestArrived(resumed), 2.0)
    scheduler.on_event(FirstToken(resumed.id), 2.1)
    scheduler.on_event(Finished(resumed.id, 110), 3.0)
    assert abs(scheduler.times(KEY, 3.0).token_s - 0.1) < 1e-9
    assert scheduler.times(KEY, 30.0).token_s == 0.0, "nothing ended lately"
