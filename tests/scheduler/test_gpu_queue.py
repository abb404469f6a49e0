"""The order in which a device runs what waits: nobody who can be on time is made late, except by the share of the time
that requests beyond their starvation bound may take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import ModelName, RequestId
from prism.core.reasons import ReasonCode
from prism.core.request import Request
from prism.core.settings import Admission
from prism.policy.admission import moore_hodgson
from prism.scheduler.gpu_queue import WaitingQueue

NOW_S = 1000.0
MAX_WAIT_S = 30.0
SHARE = 0.25
TOKENS_PER_S = 10.0

waiting = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(1, 60),  # tokens: up to 6 s of prefill
        st.sampled_from([0.15, 1.0, 5.0, 20.0]),  # objective
        st.floats(0.0, 60.0),  # age: some are beyond their bound
    ),
    min_size=1,
    max_size=40,
)


def seconds(request: Request) -> float:
    return request.prefill_tokens / TOKENS_PER_S


def ranked(sizes: list[tuple[str, int, float, float]], busy_s: float) -> list[Request]:
    """The requests in the order in which the queue would run them."""
    queue = WaitingQueue(Admission.MOORE_HODGSON, SHARE)
    requests = {}
    for i, (model, tokens, slo_s, age_s) in enumerate(sizes):
        id = RequestId(f"r{i:02}")
        requests[id] = Request(id, ModelName(model), NOW_S - age_s, tokens, slo_s, MAX_WAIT_S)
        queue.add(requests[id], NOW_S)
    queue.plan(NOW_S, busy_s, seconds, 0)
    return [requests[id] for id in queue.ranking()]


def overdue(request: Request) -> bool:
    return request.must_run_s <= NOW_S


@given(waiting, st.floats(0.0, 3.0))
def test_late_requests_make_nobody_late(sizes: list[tuple[str, int, float, float]], busy_s: float) -> None:
    young = [(m, tokens, slo_s, min(age_s, MAX_WAIT_S - 1.0)) for m, tokens, slo_s, age_s in sizes]
    order = ranked(young, busy_s)
    best = moore_hodgson([r.deadline_s for r in order], [seconds(r) for r in order], NOW_S + busy_s)
    end_s, met = NOW_S + busy_s, 0
    for request in order:
        end_s += seconds(request)
        met += end_s <= request.deadline_s + 1e-6
    assert len(order) == len(sizes)
    assert met == len(best.on_time), "as many as any order can serve on time"


@given(waiting, st.floats(0.0, 3.0))
def test_overdue_requests_take_their_share_and_no_more(
    sizes: list[tuple[str, int, float, float]], busy_s: float
) -> None:
    order = ranked(sizes, busy_s)
    rest = [r for r in order if not overdue(r)]
    slower = 1.0 / (1.0 - SHARE) if len(rest) < len(order) else 1.0
    kept = moore_hodgson([r.deadline_s for r in rest], [seconds(r) * slower for r in rest], NOW_S + busy_s)
    on_time = {rest[i].id for i in kept.on_time}
    last = max((place for place, r in enumerate(order) if r.id in on_time), default=-1)
    taken_s = total_s = largest_s = 0.0
    for request in order[: last + 1]:
        total_s += seconds(request)
        if overdue(request):
            taken_s += seconds(request)
            largest_s = max(largest_s, seconds(request))
            assert taken_s <= SHARE * total_s + largest_s + 1e-6
    end_s, lateness_s = NOW_S + busy_s, 0.0
    for request in order[: last + 1]:
        end_s += seconds(request)
        if request.id in on_time:
            lateness_s = max(lateness_s, end_s - request.deadline_s)
    assert lateness_s <= largest_s + 1e-6, "later by one overdue request at most"


@given(waiting)
def test_overdue_requests_run_in_the_order_of_their_arrival(sizes: list[tuple[str, int, float, float]]) -> None:
    arrivals = [r.arrival_s for r in ranked(sizes, 0.0) if overdue(r)]
    assert arrivals == sorted(arrivals)


changes = st.lists(
    st.tuples(
        st.sampled_from(["add"] * 6 + ["remove", "dispatch", "speed", "busy", "wait"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 60),
        st.sampled_from([1.0, 5.0, 20.0]),
        st.floats(0.0, 40.0),
    ),
    min_size=8,
    max_size=30,  # so few are planned at will
)


@given(changes)
def test_a_plan_that_stands_is_the_one_that_would_be_made(
    happened: list[tuple[str, str, int, float, float]],
) -> None:
    queue, anew = (WaitingQueue(Admission.MOORE_HODGSON, SHARE) for _ in range(2))
    now_s, busy_s, speed = NOW_S, 0.0, 1
    waiting: dict[RequestId, Request] = {}
    for i, (what, model, tokens, slo_s, number) in enumerate(happened):
        if what == "add" or not waiting:
            arrival_s = now_s - (number if number > MAX_WAIT_S else 0.0)  # overdue, or it may still be in time
            request = Request(RequestId(f"r{i:02}"), ModelName(model), arrival_s, tokens, slo_s, MAX_WAIT_S)
            waiting[request.id] = request
            queue.add(request, now_s)
            anew.add(request, now_s)
        elif what == "remove":
            id = list(waiting)[int(number) % len(waiting)]
            assert queue.remove(id) is anew.remove(id) is waiting.pop(id)
        elif what == "dispatch":
            queue.dispatched(ReasonCode.OVERDUE, number / 10.0)
            anew.dispatched(ReasonCode.OVERDUE, number / 10.0)
        elif what == "speed":
            speed += 1
        elif what == "busy":
            busy_s = number / 10.0
        elif what == "wait":
            now_s += number / 10.0

        def takes_s(request: Request, speed: int = speed) -> float:
            return seconds(request) / speed

        queue.plan(now_s, busy_s, takes_s, speed)
        anew.plan(now_s, busy_s + 1.0, takes_s, -i)  # for something else, so that the next plan is made anew
        anew.plan(now_s, busy_s, takes_s, speed)
        assert queue.ranking() == anew.ranking()
