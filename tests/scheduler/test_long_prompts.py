"""A device's scheduler and requests that are larger than the device."""

from __future__ import annotations

from dataclasses import replace

from prism.core.device_events import EngineLoad, EngineUp, MemoryReport, RequestArrived
from prism.core.effects import Dispatch, Refuse
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
    assert found.reason.code is ReasonCode.PROMPT_TOO_LARGE and not found.detail


def test_what_its_engine_lacks_for_it_is_told() -> None:
    up = replace(UP, max_request_tokens=1000, device_tokens=0, no_long="its KV is quantised")
    (found,) = arrive(up, 500_000, request("long", 3000))
    assert isinstance(found, Refuse) and found.detail == "its KV is quantised"


def test_what_all_tiers_together_do_not_hold_is_refused_with_numbers() -> None:
    (found,) = arrive(UP, 500_000, request("long", 6000))
    assert isinstance(found, Refuse)
    assert dict(found.reason.numbers) == {"tokens": 6000, "room_tokens": 5000}


def test_others_are_handed_over_for_the_memory_of_its_window_long_before_its_first_token() -> None:
    """600 slots are free beside a window of 250. One that needs 700 would wait for the end of all long requests, if the
    engine did not know of it: the window gives way only to who waits there."""
    scheduler = GpuScheduler(DeviceId("n/host:0"), GpuSettings(decode_reserve_tokens=0))
    scheduler.on_event(UP, 0.0)
    scheduler.on_event(MemoryReport(850_000, 0), 0.0)
    for name in ("long", "next"):
        found = scheduler.on_event(RequestArrived(request(name, 3000)), 0.0)
        assert [type(effect) for effect in found] == [Dispatch]
    scheduler.on_event(EngineLoad(UP.key, 1, 1, 0, window_tokens=250), 0.1)
    scheduler.on_event(MemoryReport(850_000, 0), 0.1)  # with the window's, which the engine gives back
    found = scheduler.on_event(RequestArrived(request("short", 700)), 0.2)
    assert [type(effect) for effect in found] == [Dispatch]
    found = scheduler.on_event(RequestArrived(request("more", 700)), 0.2)
    assert found == [], "it is promised once"


def test_memory_that_the_window_has_given_away_is_not_promised_again() -> None:
    scheduler = GpuScheduler(DeviceId("n/host:0"), GpuSettings(decode_reserve_tokens=0))
    scheduler.on_event(UP, 0.0)
    scheduler.on_event(MemoryReport(850_000, 0), 0.0)
    scheduler.on_event(RequestArrived(request("long", 3000)), 0.0)
    scheduler.on_event(EngineLoad(UP.key, 1, 0, 0, window_tokens=250), 0.1)
    scheduler.on_event(EngineLoad(UP.key, 1, 0, 0, window_tokens=0), 0.2)
    scheduler.on_event(MemoryReport(600_000, 0), 0.2)
    assert scheduler.on_event(RequestArrived(request("short", 700)), 0.2) == []


def test_other_models_are_handed_over_for_the_memory_of_its_window() -> None:
    other = replace(UP, key=InstanceKey(ModelName("other"), Generation(1)), device_tokens=0)
    scheduler = GpuScheduler(DeviceId("n/host:0"), GpuSettings(decode_reserve_tokens=0))
    for up in (UP, other):
        scheduler.on_event(up, 0.0)
    scheduler.on_event(MemoryReport(850_000, 0), 0.0)
    scheduler.on_event(RequestArrived(request("long", 3000)), 0.0)
    scheduler.on_event(EngineLoad(UP.key, 1, 0, 0, window_tokens=250), 0.1)
    scheduler.on_event(MemoryReport(850_000, 0), 0.1)
    found = scheduler.on_event(RequestArrived(replace(request("short", 700), model=other.key.model)), 0.2)
    assert [type(effect) for effect in found] == [Dispatch]
