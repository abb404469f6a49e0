"""A device lets requests begin as long as those that run have their time per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prism.core.device_events import EngineUp, Finished, FirstToken, MemoryReport, RequestArrived
from prism.core.effects import Dispatch, GpuEffect
from prism.core.events import Tick
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import DeviceKind, DeviceRates, Prefer
from prism.policy import promises
from prism.policy.device_time import GUESSES
from prism.policy.promises import Decoder, Entrant
from prism.scheduler import gpu_promises
from prism.scheduler.gpu import GpuScheduler

A, B = ModelName("a"), ModelName("b")
WEIGHTS = 22 * 10**9
"""Ten milliseconds of the bandwidth: four fifths of a step of 12.5 ms."""


def device(
    tpot_s: float,
    admission: Admission = Admission.MOORE_HODGSON,
    prefer: Prefer = Prefer.BOTH,
    rates: DeviceRates | None = None,
) -> GpuScheduler:
    """Engines of two models of 12.5 ms a step alone, 20 ms together; ``prefer`` is b's."""
    s = GpuScheduler(DeviceId("n/cuda:0"), GpuSettings(admission, decode_reserve_tokens=0), DeviceKind.CUDA)
    for generation, model in enumerate((A, B), 1):
        key = InstanceKey(model, Generation(generation))
        wish = prefer if model == B else Prefer.BOTH
        up = EngineUp(key, 1e4, 1, 64, weight_bytes=WEIGHTS, slo_tpot_s=tpot_s, prefer=wish, rates=rates)
        s.on_event(up, 0.0)
    s.on_event(MemoryReport(10**12), 0.0)
    return s


def arrive(s: GpuScheduler, id: str, model: ModelName, at_s: float, ttft_s: float = 2.0) -> list[str]:
    request = Request(RequestId(id), model, at_s, 100, ttft_s, 60.0, max_new_tokens=100)
    return begun(s.on_event(RequestArrived(request), at_s))


def begun(effects: list[GpuEffect]) -> list[str]:
    return [e.id for e in effects if isinstance(e, Dispatch)]


def runs(s: GpuScheduler, count: int) -> None:
    """So many requests of a decode."""
    for i in range(count):
        assert arrive(s, f"a{i}", A, 0.0) == [f"a{i}"]
        s.on_event(FirstToken(RequestId(f"a{i}")), 0.0)


def test_it_waits_until_those_that_run_are_done() -> None:
    s = device(tpot_s=0.0135)
    runs(s, 1)
    assert arrive(s, "b", B, 0.1) == []
    assert arrive(s, "another", A, 0.2) == ["another"]  # whose engine steps anyway
    s.on_event(FirstToken(RequestId("another")), 0.3)
    assert begun(s.on_event(Finished(RequestId("a0"), 0), 0.4)) == []
    assert begun(s.on_event(Finished(RequestId("another"), 0), 0.5)) == ["b"]


def test_steps_that_a_profile_knows_are_not_guessed() -> None:
    """Four times the guessed bandwidth: 2.5 ms and 2.5 ms of reading, and together no more than the device has."""
    s = device(tpot_s=0.0135, rates=replace(GUESSES[DeviceKind.CUDA], bytes_per_s=8.8e12))
    runs(s, 1)
    assert arrive(s, "b", B, 0.1) == ["b"]


def test_an_objective_with_room_for_both_holds_nobody() -> None:
    s = device(tpot_s=0.025)
    runs(s, 1)
    assert arrive(s, "b", B, 0.1) == ["b"]


def test_more_that_cannot_wait_any_longer_go_before_fewer_that_run() -> None:
    s = device(tpot_s=0.0135)
    runs(s, 4)
    for i in range(3):
        assert arrive(s, f"b{i}", B, 0.0) == []
    assert s.wake_s is not None
    assert 1.5 < s.wake_s < 2.0
    assert begun(s.on_event(Tick(), s.wake_s)) == []  # fewer would be in time with them than without
    s = device(tpot_s=0.0135, prefer=Prefer.TTFT)
    runs(s, 2)
    for i in range(3):
        assert arrive(s, f"b{i}", B, 0.0) == []
    assert s.wake_s is not None
    assert begun(s.on_event(Tick(), s.wake_s)) == ["b0", "b1", "b2"]


def test_who_prefers_a_steady_stream_waits_beyond_the_first_token_s_objective() -> None:
    s = device(tpot_s=0.0135, prefer=Prefer.TPOT)
    runs(s, 1)
    assert arrive(s, "b", B, 0.0) == []
    assert begun(s.on_event(Tick(), 2.5)) == []
    assert begun(s.on_event(Finished(RequestId("a0"), 0), 3.0)) == ["b"]
    assert arrive(s, "late", A, 3.1) == []  # what it was promised holds, late as it was


def test_what_is_too_late_does_not_begin_before_those_in_time() -> None:
    s = device(tpot_s=0.0135)
    runs(s, 1)
    assert arrive(s, "hopeless", A, 0.0, ttft_s=-1.0) == ["hopeless"]  # nobody waits: it harms nobody
    assert arrive(s, "b", B, 0.1) == []
    assert arrive(s, "more", A, 0.2, ttft_s=-1.0) == []  # it would keep b waiting


def test_what_waits_beyond_its_bound_has_a_turn() -> None:
    s = device(tpot_s=0.0135)
    runs(s, 1)
    assert arrive(s, "b", B, 0.0) == []
    assert begun(s.on_event(Tick(), 30.0)) == []
    assert begun(s.on_event(Tick(), 61.0)) == ["b"]
    s.on_event(FirstToken(RequestId("b")), 61.1)
    s.on_event(Finished(RequestId("b"), 0), 64.0)
    assert arrive(s, "b2", B, 64.0) == []
    assert begun(s.on_event(Tick(), 124.1)) == ["b2"]


def test_other_orders_hold_nobody() -> None:
    s = device(tpot_s=0.0135, admission=Admission.FCFS)
    runs(s, 1)
    assert arrive(s, "b", B, 0.1) == ["b"]


def test_what_steps_take_is_learned_from_answers() -> None:
    """Steps that take half of what their bytes say leave room for both."""
    s = device(tpot_s=0.0135)
    now_s = 0.0
    for i in range(40):
        arrive(s, f"x{i}", A, now_s)
        s.on_event(FirstToken(RequestId(f"x{i}")), now_s)
        now_s += 99 * 0.0062
        s.on_event(Finished(RequestId(f"x{i}"), 100), now_s)
    for i in range(40):
        arrive(s, f"y{i}", B, now_s)
        s.on_event(FirstToken(RequestId(f"y{i}")), now_s)
        now_s += 99 * 0.0062
        s.on_event(Finished(RequestId(f"y{i}"), 100), now_s)
    assert arrive(s, "a", A, now_s) == ["a"]
    assert arrive(s, "b", B, now_s) == ["b"]


def test_an_answer_that_was_slowed_down_before_bears_less_now() -> None:
    s = device(tpot_s=0.01875, prefer=Prefer.TTFT)
    runs(s, 2)
    assert arrive(s, "b0", B, 0.0) == ["b0"]
    s.on_event(FirstToken(RequestId("b0")), 0.0)
    s.on_event(Finished(RequestId("b0"), 0), 2.35)
    assert arrive(s, "b1", B, 2.4) == []  # they were 1.6 times slower so far, of the 1.5 that they bear
    s = device(tpot_s=0.01875, prefer=Prefer.TTFT)
    runs(s, 2)
    assert arrive(s, "b1", B, 2.4) == ["b1"]  # they had the device to themselves


def test_what_was_denied_is_asked_again_when_something_changed_or_a_moment_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Entrant] = []

    def may_begin(entrant: Entrant, others: Sequence[Decoder]) -> bool:
        asked.append(entrant)
        return promises.may_begin(entrant, others)

    monkeypatch.setattr(gpu_promises, "may_begin", may_begin)
    s = device(tpot_s=0.0135)
    runs(s, 1)
    asked.clear()
    assert arrive(s, "b", B, 0.1) == []
    for at_s in (0.11, 0.12, 0.14):
        s.on_event(MemoryReport(10**12), at_s)
    assert len(asked) == 1
    s.on_event(MemoryReport(10**12), 0.16)
    assert len(asked) == 2
    begun = s.on_event(Finished(RequestId("a0"), 0), 0.17)
    assert [effect.id for effect in begun] == ["b"] and len(asked) == 2  # beside nobody there is nothing to ask


@pytest.mark.parametrize(
    ("longest_s", "stands_still"), [(0.3, True), (0.0, True), (0.3, False)], ids=["they do", "none does", "some cannot"]
)
def test_a_third_begins_where_engines_stand_still_for_each_other(longest_s: float, stands_still: bool) -> None:
    """Three that take four fifths of the bandwidth each and bear steps of 2.35 times what they take alone."""
    settings = GpuSettings(Admission.MOORE_HODGSON, decode_reserve_tokens=0, longest_pause_s=longest_s)
    s = GpuScheduler(DeviceId("n/cuda:0"), settings, DeviceKind.CUDA)
    three = [ModelName(name) for name in "abc"]
    for generation, model in enumerate(three, 1):
        key = InstanceKey(model, Generation(generation))
        may = stands_still or model == three[0]
        up = EngineUp(key, 1e4, 1, 64, weight_bytes=WEIGHTS, slo_tpot_s=2.35 * 0.0125, stands_still=may)
        s.on_event(up, 0.0)
    s.on_event(MemoryReport(10**12), 0.0)
    for model in three[:2]:
        assert arrive(s, model, model, 0.0) == [model]
        s.on_event(FirstToken(RequestId(model)), 0.0)
    assert arrive(s, "c", three[2], 0.0) == (["c"] if longest_s and stands_still else [])
