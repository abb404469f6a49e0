"""The rules of a device's scheduler one by one."""

from __future__ import annotations

from prism.core.device_events import (
    AttemptLost,
    EngineDown,
    EngineDraining,
    EngineLoad,
    EngineUp,
    Finished,
    FirstToken,
    MemoryReport,
    RequestArrived,
    RequestCancelled,
    WaitingShared,
)
from prism.core.effects import Dispatch, GpuEffect, Refuse, SendBack
from prism.core.events import Tick
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode
from prism.core.request import Request
from prism.core.settings import Admission, GpuSettings
from prism.core.specs import LatePolicy
from prism.scheduler.gpu import GpuScheduler, InstanceCounts

A, B = ModelName("a"), ModelName("b")
A1, B2 = InstanceKey(A, Generation(1)), InstanceKey(B, Generation(2))


def scheduler(
    admission: Admission = Admission.MOORE_HODGSON, max_running: int = 1, free: int = 10**9, **engine: object
) -> GpuScheduler:
    """Two engines of 1,000 tokens/s, one byte of KV per token."""
    s = GpuScheduler(DeviceId("n/host:0"), GpuSettings(admission, 100, decode_reserve_tokens=0))
    for generation, model in enumerate((A, B), 1):
        s.on_event(EngineUp(InstanceKey(model, Generation(generation)), 1000.0, 1, max_running, **engine), 0.0)  # type: ignore[arg-type]
    s.on_event(MemoryReport(free), 0.0)
    return s


def arrive(
    s: GpuScheduler, id: str, tokens: int, slo: float, at: float = 0.0, model: ModelName = A, **more: object
) -> list[GpuEffect]:
    request = Request(RequestId(id), model, at, tokens, slo, 60.0, max_new_tokens=1, **more)  # type: ignore[arg-type]
    return s.on_event(RequestArrived(request), at)


def finish(s: GpuScheduler, id: str, at: float) -> list[GpuEffect]:
    s.on_event(FirstToken(RequestId(id)), at)
    return s.on_event(Finished(RequestId(id)), at)


def dispatched(effects: list[GpuEffect]) -> list[tuple[str, ReasonCode]]:
    return [(e.id, e.reason.code) for e in effects if isinstance(e, Dispatch)]


def test_deadlines_decide_and_the_longest_gives_way() -> None:
    s = scheduler()
    arrive(s, "first", 1000, 5.0)
    arrive(s, "long", 4000, 5.0)
    arrive(s, "short", 500, 5.5)
    arrive(s, "urgent", 500, 2.5)
    order = []
    running, now = "first", 0.0
    for _ in range(3):
        now += 1.0
        (effect,) = dispatched(finish(s, running, now))
        running = effect[0]
        order.append(effect)
    assert order == [("urgent", ReasonCode.ON_TIME), ("short", ReasonCode.ON_TIME), ("long", ReasonCode.LATE)]


def test_what_engines_tell_at_once_is_what_they_tell_one_after_the_other() -> None:
    """Where nobody waits, for a place or for memory; else each may let somebody begin."""
    one, all_at_once = scheduler(free=3000), scheduler(free=3000)
    loads = [EngineLoad(A1, 1, 0, 40, 30), EngineLoad(B2, 0, 0, 7)]
    for s in (one, all_at_once):
        arrive(s, "runs", 1000, 5.0)
        s.on_event(FirstToken(RequestId("runs")), 0.5)
        assert s.rests
    for event in (*loads, MemoryReport(900)):
        assert one.on_event(event, 1.0) == []
    all_at_once.take_loads(loads, MemoryReport(900), 1.0)
    for s in (one, all_at_once):
        assert s.rests
    assert [arrive(s, "large", 950, 5.0, 1.0, B) for s in (one, all_at_once)] == [[], []]
    assert one.on_event(MemoryReport(943), 2.0) == all_at_once.on_event(MemoryReport(943), 2.0) != []
    arrive(one, "waits", 10_000, 5.0, 2.0, B)
    assert not one.rests


def test_first_come_first_served_ignores_deadlines() -> None:
    s = scheduler(Admission.FCFS)
    for id, slo in (("one", 9.0), ("two", 8.0), ("three", 1.0)):
        arrive(s, id, 100, slo)
    assert dispatched(finish(s, "one", 1.0)) == [("two", ReasonCode.ARRIVAL_ORDER)]


def test_greedy_hands_everything_over() -> None:
    s = scheduler(Admission.GREEDY, free=10)
    assert [dispatched(arrive(s, f"r{i}", 100, 1.0)) for i in range(3)] == [
        [(f"r{i}", ReasonCode.GREEDY)] for i in range(3)
    ]


def test_late_requests_are_refused_only_where_the_catalog_says_so() -> None:
    s = scheduler()
    arrive(s, "first", 3000, 9.0)
    assert not arrive(s, "patient", 100, 1.0)
    (refusal,) = arrive(s, "strict", 100, 1.0, late=LatePolicy.REJECT)
    assert isinstance(refusal, Refuse) and refusal.reason.code is ReasonCode.LATE_REJECTED
    assert refusal.retry_after_s is not None and 1.0 <= refusal.retry_after_s <= 5.0


def test_a_request_goes_first_once_it_has_waited_for_its_bound() -> None:
    s = scheduler()
    arrive(s, "first", 1000, 5.0)
    arrive(s, "old", 9000, 1.0)
    for i in range(3):
        arrive(s, f"new{i}", 100, 5.0, at=59.0)
    assert dispatched(finish(s, "first", 61.0)) == [("old", ReasonCode.OVERDUE)]


def test_late_requests_use_the_slack_of_those_that_can_wait() -> None:
    s = scheduler()
    arrive(s, "running", 1000, 5.0)
    arrive(s, "late", 100, 0.5)
    arrive(s, "patient", 1000, 5.0)
    assert dispatched(finish(s, "running", 1.0)) == [("late", ReasonCode.LATE)], "nobody is late because of it"


def test_the_old_one_that_lacks_memory_makes_nobody_else_late() -> None:
    s = scheduler(max_running=10, free=1000)
    arrive(s, "running", 600, 9.0)
    s.on_event(FirstToken(RequestId("running")), 0.6)
    s.on_event(MemoryReport(400), 0.6)
    arrive(s, "old", 700, 1.0, at=0.7)
    started = arrive(s, "small", 20, 1.0, at=70.0, model=B)
    assert dispatched(started) == [("small", ReasonCode.ON_TIME)]
    assert not dispatched(arrive(s, "later", 20, 1.0, at=130.0, model=B)), "after twice its bound memory is kept for it"


def test_in_a_lasting_overload_old_requests_get_a_share_and_no_more() -> None:
    s = scheduler()
    arrive(s, "running", 100, 5.0)
    for i in range(40):
        arrive(s, f"old{i:02}", 100, 1.0)
    s.on_event(FirstToken(RequestId("running")), 0.1)
    running, now, codes = "running", 100.0, []
    for i in range(40):
        for place in range(2):
            arrive(s, f"new{i:02}{place}", 100, 1.0, at=now)
        now += 0.1
        ((running, code),) = dispatched(finish(s, running, now))
        codes.append(code)
    assert codes.count(ReasonCode.OVERDUE) == 10, "a quarter of the time is theirs"
    assert codes.count(ReasonCode.ON_TIME) == 30


def test_no_more_is_handed_out_than_one_step_prefills() -> None:
    s = scheduler(max_running=10, chunk_tokens=250)
    started = [bool(dispatched(arrive(s, f"r{i}", 100, 5.0))) for i in range(5)]
    assert started == [True, True, True, False, False]
    assert dispatched(s.on_event(FirstToken(RequestId("r0")), 0.1)) == [("r3", ReasonCode.ON_TIME)]


def test_an_engine_that_begins_steps_beside_others_gets_as_many_steps_worth() -> None:
    """Some of its prompts are in engines that run layers for it."""
    s = scheduler(max_running=10, chunk_tokens=250)
    started = [bool(dispatched(arrive(s, f"r{i}", 100, 5.0))) for i in range(4)]
    assert started == [True, True, True, False]
    assert [id for id, _ in dispatched(s.on_event(EngineLoad(A1, 3, 0, 1000, ahead=2), 0.1))] == ["r3"]
    started = [bool(dispatched(arrive(s, f"r{i}", 100, 5.0, at=0.1))) for i in range(4, 7)]
    assert started == [True, False, False]
    assert not dispatched(s.on_event(EngineLoad(A1, 5, 0, 1000), 0.2)), "it is alone again"


def test_a_queue_inside_the_engine_stops_dispatching() -> None:
    s = scheduler(max_running=10)
    arrive(s, "one", 100, 5.0)
    s.on_event(FirstToken(RequestId("one")), 0.1)
    s.on_event(EngineLoad(A1, 0, 1, 0), 0.1)  # "one" was retracted
    assert not arrive(s, "two", 100, 5.0, at=0.2)
    assert dispatched(s.on_event(EngineLoad(A1, 1, 0, 0), 0.3)) == [("two", ReasonCode.ON_TIME)]


def test_who_lacks_memory_is_not_overtaken_by_smaller_ones_but_others_use_what_is_theirs() -> None:
    s = scheduler(max_running=10, free=1000)
    arrive(s, "running", 600, 9.0)
    s.on_event(FirstToken(RequestId("running")), 0.1)
    s.on_event(MemoryReport(400), 0.1)
    assert not arrive(s, "large", 700, 2.0, at=0.2)
    assert not arrive(s, "small", 100, 9.0, at=0.2, model=B), "the free 400 are kept for the large one"
    effects = s.on_event(EngineLoad(B2, 0, 0, 150), 0.3)
    assert dispatched(effects) == [("small", ReasonCode.ON_TIME)], "b's own free slots are nobody else's"
    s.on_event(Finished(RequestId("running")), 1.0)
    assert dispatched(s.on_event(MemoryReport(1000), 1.0)) == [("large", ReasonCode.ON_TIME)]


def test_between_reports_dispatched_requests_count_as_taken() -> None:
    s = scheduler(max_running=10, free=1000)
    assert dispatched(arrive(s, "one", 600, 9.0))
    assert not dispatched(arrive(s, "two", 600, 9.0))


def test_what_an_engine_caches_is_free_memory_of_the_device_and_counts_once() -> None:
    s = scheduler(max_running=10, free=500)
    s.on_event(EngineLoad(A1, 0, 0, 520, cached_kv_tokens=500), 0.0)  # 20 free slots; the device's 500 are A's cache
    assert not arrive(s, "huge", 600, 9.0), "not 520 slots and 500 bytes more"
    s.on_event(RequestCancelled(RequestId("huge")), 0.0)
    assert dispatched(arrive(s, "one", 400, 9.0))
    assert not arrive(s, "two", 400, 9.0, model=B), "the cache is promised to one"
    assert dispatched(arrive(s, "three", 100, 1.0, model=B)) == [("three", ReasonCode.ON_TIME)]


def test_what_an_idle_engine_caches_makes_room_by_the_slot_and_not_by_the_page() -> None:
    s = scheduler(max_running=10, free=500, kv_page_bytes=256)
    s.on_event(EngineLoad(A1, 0, 0, 520, cached_kv_tokens=500), 0.0)
    assert not arrive(s, "huge", 530, 9.0), "there are 520 slots"
    s.on_event(RequestCancelled(RequestId("huge")), 0.0)
    assert dispatched(arrive(s, "one", 510, 9.0)) == [("one", ReasonCode.ON_TIME)]
    assert not arrive(s, "two", 10, 9.0, model=B), "all of it is promised"


def test_what_a_fixed_share_caches_is_its_own() -> None:
    s = scheduler(max_running=10, free=0, elastic=False)
    s.on_event(EngineLoad(A1, 0, 0, 100, cached_kv_tokens=100), 0.0)
    assert dispatched(arrive(s, "one", 100, 1.0))


def test_what_can_never_fit_is_refused_with_numbers_at_its_bound() -> None:
    s = scheduler(free=500)
    assert not arrive(s, "huge", 900, 1.0)
    assert s.wake_s == 60.0
    (refusal,) = s.on_event(Tick(), 60.0)
    assert isinstance(refusal, Refuse) and refusal.retry_after_s is None
    assert dict(refusal.reason.numbers) == {"tokens": 900, "room_tokens": 500}


def test_a_prompt_beyond_the_engines_bound_is_refused_at_once() -> None:
    s = scheduler(max_request_tokens=512)
    (refusal,) = arrive(s, "r", 512, 1.0)
    assert isinstance(refusal, Refuse) and refusal.reason.code is ReasonCode.PROMPT_TOO_LARGE


def test_a_fixed_share_bounds_only_its_own_engine() -> None:
    s = scheduler(max_running=10, elastic=False)
    s.on_event(EngineLoad(A1, 0, 0, 100), 0.0)
    s.on_event(EngineLoad(B2, 0, 0, 100), 0.0)
    assert not arrive(s, "large", 200, 1.0)
    assert dispatched(arrive(s, "other", 50, 1.0, model=B)) == [("other", ReasonCode.ON_TIME)]


def test_lost_attempts_come_first_where_the_model_still_serves_and_go_back_where_not() -> None:
    s = scheduler()
    arrive(s, "one", 100, 5.0)
    arrive(s, "two", 100, 5.0)
    arrive(s, "three", 100, 1.0)
    effects = s.on_event(EngineDown(A1), 1.0)
    assert {e.id for e in effects if isinstance(e, SendBack)} == {"two", "three"}
    s.on_event(EngineUp(InstanceKey(A, Generation(9)), 1000.0, 1, 1), 2.0)
    arrive(s, "four", 100, 5.0, at=2.0)
    s.on_event(AttemptLost(RequestId("one"), 5), 2.0)
    (effect,) = finish(s, "four", 3.0)
    assert dispatched([effect]) == [("one", ReasonCode.RESUMED)]
    assert isinstance(effect, Dispatch) and effect.key.generation == 9
    s.on_event(EngineDown(InstanceKey(A, Generation(9))), 4.0)
    assert isinstance(s.on_event(AttemptLost(RequestId("one"), 8), 4.0)[0], SendBack)


def test_the_queue_is_bounded_with_an_honest_retry_after() -> None:
    s = scheduler()
    for i in range(101):
        arrive(s, f"r{i}", 1000, 5.0)
    (refusal,) = arrive(s, "more", 1000, 5.0)
    assert isinstance(refusal, Refuse) and refusal.reason.code is ReasonCode.QUEUE_FULL
    assert refusal.retry_after_s is not None and 90.0 <= refusal.retry_after_s <= 101.0


def test_positions_count_over_all_models() -> None:
    s = scheduler()
    for id, slo, model in (("x", 9.0, A), ("y", 9.0, B), ("late", 5.0, A), ("soon", 1.0, B)):
        arrive(s, id, 10, slo, model=model)
    finish(s, "x", 0.1)  # hands over "late"; the plan is made anew
    assert s.positions() == {"soon": 1}


def test_new_requests_go_to_the_newest_instance_that_serves_and_the_old_one_finishes_what_it_has() -> None:
    s = scheduler()
    old, new = A1, InstanceKey(A, Generation(5))
    arrive(s, "one", 100, 5.0)
    arrive(s, "two", 100, 5.0)
    (handed,) = s.on_event(EngineUp(new, 1000.0, 1, 1), 1.0)
    assert isinstance(handed, Dispatch) and (handed.id, handed.key) == ("two", new)
    assert s.counts(old) == InstanceCounts(0, 1, 0)
    s.on_event(FirstToken(RequestId("one")), 1.5)
    assert not s.on_event(EngineDraining(old), 2.0), "nothing waits for the old one"
    assert s.counts(old) == InstanceCounts(0, 1, 1)
    s.on_event(Finished(RequestId("one")), 3.0)
    assert not s.on_event(EngineDown(old), 3.0)
    assert not arrive(s, "three", 100, 5.0, at=3.0)
    (sent_back,) = s.on_event(EngineDown(new), 4.0)
    assert isinstance(sent_back, SendBack) and sent_back.id == "three"


def test_when_the_newest_instance_leaves_the_older_one_that_still_serves_takes_over() -> None:
    s = scheduler()
    new = InstanceKey(A, Generation(5))
    s.on_event(EngineUp(new, 1000.0, 1, 1), 0.0)
    (first,) = arrive(s, "one", 100, 5.0)
    arrive(s, "two", 100, 5.0)
    assert isinstance(first, Dispatch) and first.key == new
    (second,) = s.on_event(EngineDown(new), 1.0)
    assert isinstance(second, Dispatch) and second.key == A1
    s.on_event(AttemptLost(RequestId("one"), 3), 1.0)
    assert s.counts(A1) == InstanceCounts(1, 1, 0)


def test_an_engine_whose_requests_take_turns_gets_more_than_it_has_memory_for() -> None:
    """In the order of the device, and as far as prompts are not ahead of them by a chunk."""
    s = scheduler(free=300)
    s.on_event(EngineUp(A1, 1000.0, 1, max_running=1, chunk_tokens=500, fair=True), 0.0)
    for i in range(4):
        assert [id for id, _ in dispatched(arrive(s, f"r{i}", 200, 5.0))] == ([f"r{i}"] if i < 3 else [])
    assert dispatched(arrive(s, "other", 200, 5.0, model=B)), "what takes turns is no claim on the device's memory"
    assert not dispatched(s.on_event(EngineLoad(A1, running=1, waiting=2, free_kv_tokens=0), 0.1))
    assert dispatched(s.on_event(FirstToken(RequestId("r0")), 0.2)) == [("r3", ReasonCode.ON_TIME)]
    assert s.counts(A1) == InstanceCounts(waiting=0, running=4, served=1)


def test_what_waits_is_shared_with_instances_that_came_up_the_last_first() -> None:
    s = scheduler()
    for number in range(7):
        arrive(s, f"r{number}", 100, 100.0 + number)
    assert s.counts(A1) == InstanceCounts(waiting=6, running=1)
    effects = s.on_event(WaitingShared(A1, 0.5), 0.1)
    assert [(e.id, e.reason.code) for e in effects if isinstance(e, SendBack)] == [
        (f"r{number}", ReasonCode.SHARED_OUT) for number in (4, 5, 6)
    ]
    assert s.counts(A1).waiting == 3
    arrive(s, "r6", 100, 106.0)
    effects = s.on_event(WaitingShared(A1, 0.0), 0.2)
    assert [e.id for e in effects if isinstance(e, SendBack)] == ["r1", "r2", "r3", "r6"], "one that came back leaves"
    assert s.on_event(WaitingShared(InstanceKey(A, Generation(9)), 0.5), 0.2) == [], "of another instance"
    assert s.on_event(WaitingShared(B2, 0.0), 0.2) == [], "none waits"


def test_a_request_whose_stream_has_begun_stays_when_others_are_shared() -> None:
    s = scheduler()
    arrive(s, "runs", 100, 100.0)
    arrive(s, "resumed", 100, 50.0, generated_tokens=5)
    arrive(s, "waits", 100, 100.0)
    assert [e.id for e in s.on_event(WaitingShared(A1, 0.0), 0.1) if isinstance(e, SendBack)] == ["waits"]
