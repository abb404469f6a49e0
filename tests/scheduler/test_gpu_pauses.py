"""A device's scheduler says which engines stand still for a moment."""

from __future__ import annotations

import math

import pytest

from prism.core.device_events import EngineDown, EngineUp, Finished, FirstToken, MemoryReport, RequestArrived
from prism.core.effects import Hold
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import DeviceKind, DeviceRates, Prefer
from prism.policy.pauses import AHEAD
from prism.scheduler.gpu import GpuScheduler
from prism.scheduler.gpu_pauses import LOOK_EVERY_S

RATES = DeviceRates(3e-3, 0.0, 1e12)
WEIGHTS = 7 * 10**9
"""Seven of the ten milliseconds of a step."""
TPOT_S = 0.0204


def device(longest_s: float, engines: int = 3, prefer: Prefer = Prefer.BOTH) -> GpuScheduler:
    """Every model runs one answer since 0 s, as rivals begin all; ``prefer`` is the last one's."""
    settings = GpuSettings(Admission.GREEDY, longest_pause_s=longest_s)
    s = GpuScheduler(DeviceId("n/cuda:0"), settings, DeviceKind.CUDA)
    s.on_event(MemoryReport(10**12), 0.0)
    for i in range(engines):
        wish = prefer if i == engines - 1 else Prefer.BOTH
        s.on_event(EngineUp(key(i), 1e4, 1, 64, weight_bytes=WEIGHTS, slo_tpot_s=TPOT_S, prefer=wish, rates=RATES), 0.0)
        s.on_event(RequestArrived(Request(RequestId(f"r{i}"), ModelName(f"m{i}"), 0.0, 1, 1.0, 60.0)), 0.0)
        s.on_event(FirstToken(RequestId(f"r{i}")), 0.0)
    return s


def key(i: int) -> InstanceKey:
    return InstanceKey(ModelName(f"m{i}"), Generation(i + 1))


def look(s: GpuScheduler, now_s: float, *tokens: int) -> list[Hold]:
    return s.pauses.look({key(i): {RequestId(f"r{i}"): count} for i, count in enumerate(tokens)}, now_s)


def test_who_is_ahead_stands_still_and_the_reason_says_so() -> None:
    s = device(0.3)
    (hold,) = look(s, 1.0, 49, 49, 70)
    assert (hold.key, hold.model, hold.for_s) == (key(2), "m2", LOOK_EVERY_S)
    assert hold.reason.as_dict() == {"code": ReasonCode.BEARS_A_PAUSE, "engines": 3, "answers": 1, "stood_s": 0.0}


def test_who_cannot_be_saved_gives_way() -> None:
    (hold,) = look(device(0.3), 1.0, 49, 20, 49)
    assert (hold.key, hold.reason.code) == (key(1), ReasonCode.GIVES_WAY)


def test_nobody_stands_still_for_longer_than_the_setting_says() -> None:
    s = device(0.3)
    stands = [key(1) in {hold.key for hold in look(s, 1.0 + 0.05 * i, 49 + i, 10, 49 + i)} for i in range(20)]
    longest = max(len(run) for run in "".join("x" if held else " " for held in stands).split())
    assert 4 <= longest <= 6 and not all(stands)


def test_off_nobody_ever_does() -> None:
    s = device(0.0)
    assert not s.pauses.wanted
    assert look(s, 1.0, 49, 49, 70) == []


def test_an_engine_whose_answers_nobody_can_stop_runs() -> None:
    assert key(2) in {hold.key for hold in look(device(0.3), 1.0, 49, 49, 70)}
    assert key(2) not in {hold.key for hold in look(device(0.3), 1.0, 49, 49)}


def test_who_prefers_first_tokens_stands_still_for_others() -> None:
    (hold,) = look(device(0.3, prefer=Prefer.TTFT), 1.0, 49, 49, 49)
    assert hold.key == key(2)


def test_nobody_stands_still_alone() -> None:
    s = device(0.3)
    assert look(s, 1.0, 49, 49, 70)
    s.on_event(Finished(RequestId("r0"), 60), 1.1)
    assert not s.pauses.wanted, "two never have to"
    assert look(s, 1.1, 0, 40, 70) == [] and s.pauses.next_look_s == math.inf
    s.on_event(EngineDown(key(1)), 1.2)
    assert not s.pauses.wanted and look(s, 1.2, 0, 0, 70) == []


def test_it_is_looked_again_when_an_answer_could_fall_behind_and_not_before() -> None:
    s = device(0.3)
    assert look(s, 1.0, 60, 60, 60) == []
    margin_s = (60 + AHEAD) * TPOT_S - 1.0 - AHEAD * 2.1 * 0.01
    assert s.pauses.next_look_s == pytest.approx(1.0 + margin_s)
    look(s, 1.0, 49, 49, 70)
    assert s.pauses.next_look_s == pytest.approx(1.0 + LOOK_EVERY_S), "while somebody stands still"
