"""A device's scheduler and requests that are larger than the device."""

from __future__ import annotations

from dataclasses import replace

from prism.core.effects import Dispatch, Refuse
from prism.core.events import EngineUp, MemoryReport, RequestArrived
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode
from prism.core.request import Request
from prism.core.settings import GpuSettings
from prism.core.specs import LatePolicy
from prism.scheduler.gpu import GpuScheduler

MODEL = ModelName("m")
UP = EngineUp(InstanceKey(MODEL, Generation(1)), 1e4, 1000, 8, max_request_tokens=5000, device_tokens=1000)


def request(name: str, tokens: int) -> Request:
    return Request(RequestId(name), MODEL, 0.0, tokens, 10.0, 30.0, LatePolicy.SERVE, 100)


def arrive(up: EngineUp, free_bytes: int, *requests: Request) -> list[object]:
    scheduler = GpuScheduler(DeviceId("n/host:0"), GpuSettings())
    scheduler.on_event(up, 0.0)
    scheduler.on_event(MemoryReport(free_bytes, 0), 0.0)
    return [effect for one in requests for effect in scheduler.on_event(RequestArrived(one), 0.0)]


def test_it_is_handed_over_with_memory_for_its_window_and_holds_nobody_up() -> None:
    found = arrive(UP, 500_000, request("long", 3000), request("short", 100))
    assert [type(effect) for effect in found] == [Dispatch, Dispatch]


def test_where_there_is_no_such_mode_it_is_refused() -> None:
    (found,) = arrive(replace(UP, max_request_tokens=1000, device_tokens=0), 500_000, request("long", 3000))
    assert isinstance(found, Refuse)
    assert found.reason.code is ReasonCode.PROMPT_TOO_LARGE


def test_what_all_tiers_together_do_not_hold_is_refused_with_numbers() -> None:
    (found,) = arrive(UP, 500_000, request("long", 6000))
    assert isinstance(found, Refuse)
    assert dict(found.reason.numbers) == {"tokens": 6000, "room_tokens": 5000}
