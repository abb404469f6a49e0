"""A device's scheduler lets an engine's answers go on between its prompts."""

from __future__ import annotations

import pytest

from prism.core.device_events import EngineUp, FirstToken, MemoryReport, RequestArrived, RequestCancelled
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


def arrive(s: GpuScheduler, id: str, at_s: float, tokens: int = 2_000) -> list[str]:
    return begun(s.on_event(RequestArrived(Request(RequestId(id), A, at_s, tokens, 5.0, 60.0)), at_s))


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
    assert s.wake_s is not None
    together = begun(s.on_event(Tick(), s.wake_s + 1.0))
    assert "short0" in together and len(together) > 1


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
