"""A device's scheduler lets an engine's answers go on between its prompts."""

from __future__ import annotations

import pytest

from prism.core.device_events import EngineUp, Finished, FirstToken, MemoryReport, RequestArrived, RequestCancelled
from prism.core.effects import Dispatch, GpuEffect
from prism.core.events import Tick
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import DeviceKind, Prefer
from prism.scheduler.gpu import GpuScheduler

A = ModelName("a")
WEIGHTS = 22 * 10**9
"""Steps of 12.5 ms."""
TPOT_S = 0.1
TOKENS_PER_S = 5e3


def device(admission: Admission = Admission.MOORE_HODGSON, prefer: Prefer = Prefer.BOTH) -> GpuScheduler:
    s = GpuScheduler(DeviceId("n/cuda:0"), GpuSettings(admission, decode_reserve_tokens=0), DeviceKind.CUDA)
    key = InstanceKey(A, Generation(1))
    s.on_event(EngineUp(key, TOKENS_PER_S, 1, 64, weight_bytes=WEIGHTS, slo_tpot_s=TPOT_S, prefer=prefer), 0.0)
    s.on_event(MemoryReport(10**12), 0.0)
    return s


def arrive(s: GpuScheduler, id: str, at_s: float, tokens: int = 2_000, slo_ttft_s: float = 5.0) -> list[str]:
    return begun(s.on_event(RequestArrived(Request(RequestId(id), A, at_s, tokens, slo_ttft_s, 60.0)), at_s))


def begun(effects: list[GpuEffect]) -> list[str]:
    return [str(e.id) for e in effects if isinstance(e, Dispatch)]


def answered(s: GpuScheduler, id: str, at_s: float) -> list[str]:
    return begun(s.on_event(FirstToken(RequestId(id)), at_s))


def stalled(s: GpuScheduler) -> None:
    """One answers; prompts of 2 s stood before its tokens until 2.2 s."""
    assert arrive(s, "first", 0.0) == ["first"]
    assert answered(s, "first", 0.4) == []
    assert arrive(s, "long", 0.4, 7_000) == ["long"]
    assert arrive(s, "behind", 0.5) == []
    assert answered(s, "long", 2.2) == []


def test_a_prompt_waits_until_answers_have_caught_up() -> None:
    s = device()
    stalled(s)
    due_s = s.wake_s
    assert due_s is not None and 2.2 < due_s < 3.0
    assert begun(s.on_event(Tick(), due_s - 0.01)) == []
    assert begun(s.on_event(Tick(), due_s)) == ["behind"]


def test_prompts_that_waited_begin_together_as_far_as_answers_bear_them() -> None:
    s = device()
    stalled(s)
    for i in range(4):
        assert arrive(s, f"short{i}", 2.2, 10) == []
    assert begun(s.on_event(Tick(), 5.0)) == ["behind", *(f"short{i}" for i in range(4))]


def test_a_prompt_that_can_wait_spends_nothing_that_is_kept_for_those_in_a_hurry() -> None:
    s = device()
    assert arrive(s, "first", 0.0) == ["first"]
    answered(s, "first", 0.4)
    assert arrive(s, "second", 1.0) == ["second"]
    assert arrive(s, "patient", 1.0) == []
    answered(s, "second", 1.4)
    due_s = s.wake_s
    assert due_s is not None and 1.4 < due_s < 1.0 + 0.35 * 5.0 - 0.4
    assert begun(s.on_event(Tick(), due_s - 0.01)) == []
    assert begun(s.on_event(Tick(), due_s)) == ["patient"]


def test_a_prompt_waits_for_a_third_of_its_objective_at_most() -> None:
    s = device()
    assert arrive(s, "first", 0.0) == ["first"]
    answered(s, "first", 0.4)
    assert arrive(s, "second", 1.0) == ["second"]
    assert arrive(s, "patient", 1.0, 1_000, slo_ttft_s=2.0) == []
    due_s = s.wake_s
    assert due_s is not None and due_s == pytest.approx(1.0 + 0.35 * 2.0 - 0.4 - 0.2)
    assert begun(s.on_event(Tick(), due_s)) == ["patient"]


def burst(answer_tokens: int, *, prefer: Prefer = Prefer.BOTH) -> list[str]:
    """Which of the last nineteen begin at once of twenty prompts, 0.4 s each and due within 5 s, that come beside an
    answer. Answers had so many tokens so far."""
    s = device(prefer=prefer)
    for i in range(40):
        assert arrive(s, f"before{i}", i * 100.0, 10) == [f"before{i}"]
        answered(s, f"before{i}", i * 100.0 + 0.002)
        took_s = 0.02 * answer_tokens
        s.on_event(Finished(RequestId(f"before{i}"), 1 + answer_tokens), i * 100.0 + 0.002 + took_s)
    now_s = 10_000.0
    assert arrive(s, "first", now_s, 2_000, 60.0) == ["first"]
    answered(s, "first", now_s + 0.4)
    few = [id for i in range(5) for id in arrive(s, f"few{i}", now_s + 0.4)]
    assert few == ["few0"], "the others have time"
    return [id for i in range(15) for id in arrive(s, f"many{i}", now_s + 0.4)]


def test_of_many_that_would_wait_for_too_long_the_first_begin_at_once_where_answers_are_long() -> None:
    assert burst(1_000)[:2] == ["few1", "few2"], "when the line is too long"
    assert burst(3) == [], "it would stop the answer for longer than that lasts"
    assert burst(1_000, prefer=Prefer.TPOT) == []


def test_a_prompt_in_a_hurry_spends_what_is_kept() -> None:
    s = device()
    assert arrive(s, "first", 0.0) == ["first"]
    answered(s, "first", 0.4)
    assert arrive(s, "second", 1.0) == ["second"]
    assert arrive(s, "hurried", 1.0, 1_000, slo_ttft_s=1.0) == ["hurried"]


def test_where_only_the_time_per_token_counts_a_prompt_waits_until_answers_bear_it() -> None:
    s = device(prefer=Prefer.TPOT)
    assert arrive(s, "first", 0.0) == ["first"]
    answered(s, "first", 0.4)
    assert arrive(s, "second", 1.0) == ["second"]
    assert arrive(s, "hurried", 1.0, 1_000, slo_ttft_s=1.0) == []


@pytest.mark.parametrize(
    ("admission", "prefer"), [(Admission.MOORE_HODGSON, Prefer.TTFT), (Admission.GREEDY, Prefer.BOTH)]
)
def test_nobody_waits_where_nobody_minds(admission: Admission, prefer: Prefer) -> None:
    s = device(admission, prefer)
    assert arrive(s, "first", 0.0) == ["first"]
    answered(s, "first", 0.4)
    assert arrive(s, "long", 0.4, 7_000) == ["long"]
    answered(s, "long", 2.2)
    assert arrive(s, "next", 2.2) == ["next"]


def test_a_prompt_that_is_cancelled_holds_nobody_up() -> None:
    s = device()
    assert arrive(s, "first", 0.0) == ["first"]
    answered(s, "first", 0.4)
    assert arrive(s, "long", 0.4, 7_000) == ["long"]
    assert arrive(s, "behind", 0.41) == []
    assert begun(s.on_event(RequestCancelled(RequestId("long")), 0.42)) == ["behind"]
