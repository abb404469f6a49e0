"""How long requests of a device have been waiting for memory, and when its controller hears of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.device_events import (
    EngineDown,
    EngineLoad,
    EngineUp,
    Finished,
    FirstToken,
    MemoryReport,
    RequestArrived,
    RequestCancelled,
)
from prism.core.effects import Dispatch
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.shortage import LEAVES_S, SLO_SHARE, Shortage

A, B = ModelName("a"), ModelName("b")
SLO_S = 0.4
LONG_S = SLO_SHARE * SLO_S


def scheduler(free_bytes: int, page_bytes: int = 1, max_running: int = 8, elastic: bool = True) -> GpuScheduler:
    """Two engines, one byte of KV per token."""
    s = GpuScheduler(DeviceId("n/host:0"), GpuSettings(Admission.MOORE_HODGSON, 100, decode_reserve_tokens=0))
    for generation, model in enumerate((A, B), 1):
        up = EngineUp(
            InstanceKey(model, Generation(generation)), 1e6, 1, max_running, elastic=elastic, kv_page_bytes=page_bytes
        )
        s.on_event(up, 0.0)
        s.on_event(EngineLoad(up.key, 0, 0, 0), 0.0)
    s.on_event(MemoryReport(free_bytes), 0.0)
    return s


def arrive(s: GpuScheduler, id: str, tokens: int, at_s: float, model: ModelName = A) -> bool:
    """Whether it was dispatched at once."""
    request = Request(RequestId(id), model, at_s, tokens, SLO_S, 60.0, max_new_tokens=1)
    return any(isinstance(e, Dispatch) and e.id == id for e in s.on_event(RequestArrived(request), at_s))


def test_a_request_that_finds_no_memory_begins_it_and_one_that_gets_it_ends_it() -> None:
    s = scheduler(100)
    assert arrive(s, "first", 80, 0.0)
    assert s.shortage.age_s(1.0) == 0.0
    assert not arrive(s, "second", 50, 1.0)
    assert s.shortage.age_s(1.5) == 0.5
    s.on_event(FirstToken(RequestId("first")), 1.5)
    s.on_event(Finished(RequestId("first")), 1.6)
    s.on_event(MemoryReport(100), 1.6)
    assert s.shortage.age_s(2.0) == 0.0


def test_a_queue_for_places_is_none() -> None:
    s = scheduler(1000, max_running=1)
    arrive(s, "first", 10, 0.0)
    assert not arrive(s, "second", 10, 0.0)
    assert s.shortage.age_s(5.0) == 0.0


def test_a_fixed_share_that_is_full_is_none() -> None:
    """No model that leaves could mend it."""
    s = scheduler(1000, elastic=False)
    assert not arrive(s, "first", 10, 0.0)
    assert s.shortage.age_s(5.0) == 0.0


def test_what_engines_lack_for_requests_that_they_have_counts() -> None:
    s = scheduler(100)
    s.on_event(MemoryReport(0, 50), 1.0)
    assert s.shortage.age_s(1.2) == 0.0, "weights that are being loaded want memory, no request does"
    s.on_event(MemoryReport(100), 1.2)
    assert arrive(s, "first", 80, 1.2)
    s.on_event(MemoryReport(0, 50), 1.3)
    assert s.shortage.age_s(1.5) == pytest.approx(0.2)


def test_memory_comes_in_pages() -> None:
    """Two requests for half a page each, of different engines, need two."""
    s = scheduler(100, page_bytes=100)
    assert arrive(s, "first", 50, 0.0, A)
    assert not arrive(s, "second", 50, 0.0, B)
    assert arrive(scheduler(200, page_bytes=100), "first", 50, 0.0)


def test_when_a_model_has_left_its_memory_is_tried_first() -> None:
    s = scheduler(100)
    arrive(s, "first", 80, 0.0)
    arrive(s, "second", 50, 0.0)
    s.on_event(EngineDown(InstanceKey(B, Generation(2))), 0.3)
    assert s.shortage.age_s(0.3) == 0.0
    assert s.shortage.age_s(0.4) == pytest.approx(0.1)


def test_it_counts_when_it_is_longer_than_a_request_can_bear() -> None:
    """A part of the objective, and no less than what leaving takes."""
    for slo_s, bearable_s in ((SLO_S, LONG_S), (8.0, 2.0), (0.01, LEAVES_S)):
        shortage = Shortage()
        shortage.note_waiting(slo_s, 1.0)
        assert shortage.report_due_s() == 1.0 + bearable_s
        assert shortage.age_s(1.0 + 0.99 * bearable_s) == 0.0
        assert shortage.age_s(1.0 + bearable_s) == pytest.approx(bearable_s)


def test_it_is_reported_once_and_again_when_it_begins_anew() -> None:
    shortage = Shortage()
    assert shortage.report_due_s() == float("inf")
    shortage.note_waiting(SLO_S, 1.0)
    assert shortage.report_due_s() == 1.0 + LONG_S
    shortage.note_report(1.0 + LONG_S)
    assert shortage.report_due_s() == float("inf"), "other reports say how long it lasts"
    shortage.note_waiting(None, 2.0)
    shortage.note_waiting(SLO_S, 3.0)
    assert shortage.report_due_s() == 3.0 + LONG_S


def test_short_breaks_do_not_end_it_and_many_do_not_make_many_reports() -> None:
    shortage = Shortage()
    told_s = []
    for i in range(1000):  # ten seconds in which each freed page is taken at once
        now_s = i * 0.01
        shortage.note_waiting(None if i % 2 else SLO_S, now_s)
        if shortage.report_due_s() <= now_s:
            shortage.note_report(now_s)
            told_s.append(now_s)
    assert told_s == [pytest.approx(LONG_S, abs=0.02)]
    assert shortage.age_s(9.99) == pytest.approx(9.99)


@given(st.lists(st.tuples(st.floats(0.001, 0.5), st.none() | st.floats(0.01, 2.0)), min_size=1, max_size=60))
def test_reports_keep_their_distance_and_ages_never_exceed_the_time_since_the_beginning(
    steps: list[tuple[float, float | None]],
) -> None:
    shortage, now_s, told_s, first_s = Shortage(), 0.0, float("-inf"), None
    for pause_s, slo_s in steps:
        now_s += pause_s
        shortage.note_waiting(slo_s, now_s)
        first_s = now_s if slo_s is not None and first_s is None else first_s
        age_s = shortage.age_s(now_s)
        assert 0.0 <= age_s <= (0.0 if first_s is None else now_s - first_s)
        if shortage.report_due_s() <= now_s:
            assert now_s - told_s >= 0.25 - 1e-9
            assert age_s >= LEAVES_S - 1e-9, "what is reported counts"
            shortage.note_report(now_s)
            told_s = now_s


def test_short_answers_need_less_kept_for_them() -> None:
    """Ten tokens of an answer of twenty, sixty-four of a long one or one without a bound."""
    for most, left in ((20, 90), (1000, 36), (0, 36)):
        s = GpuScheduler(DeviceId("n/host:0"), GpuSettings(Admission.MOORE_HODGSON, 100))
        s.on_event(EngineUp(InstanceKey(A, Generation(1)), 1e6, 1, 8), 0.0)
        s.on_event(MemoryReport(1000), 0.0)
        first = Request(RequestId("first"), A, 0.0, 100, SLO_S, 60.0, max_new_tokens=most)
        s.on_event(RequestArrived(first), 0.0)
        s.on_event(FirstToken(first.id), 0.1)
        s.on_event(EngineLoad(InstanceKey(A, Generation(1)), 1, 0, 0), 0.2)
        s.on_event(MemoryReport(100), 0.2)
        fits = Request(RequestId("fits"), A, 0.3, left - 1, SLO_S, 60.0, max_new_tokens=1)
        too_large = Request(RequestId("large"), A, 0.3, left, SLO_S, 60.0, max_new_tokens=1)
        assert not s.on_event(RequestArrived(too_large), 0.3)
        s.on_event(RequestCancelled(too_large.id), 0.3)
        assert s.on_event(RequestArrived(fits), 0.3)
