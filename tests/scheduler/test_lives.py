"""The life of a request on a device and of an instance: which transitions there are, and what each causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.device_events import AttemptLost, DispatchRejected, Finished, RequestArrived, RequestCancelled
from prism.core.ids import Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.views import InstanceState
from prism.scheduler.instance_life import DRAIN_S, InstanceLife, InstanceStep
from prism.scheduler.request_life import DeviceRequests, ImpossibleTransition, Stage

M = ModelName("m")
OLD, NEW = InstanceKey(M, Generation(1)), InstanceKey(M, Generation(2))


@dataclass
class Held:
    """The least that a world keeps of a request."""

    id: RequestId
    model: ModelName = M
    delivered_tokens: int = 0
    stage: Stage = Stage.NEW
    instance: InstanceKey | None = None

    def request(self) -> Request:
        return Request(self.id, self.model, 0.0, 10, 1.0, 60.0, generated_tokens=self.delivered_tokens)


def held(name: str = "r") -> Held:
    return Held(RequestId(name))


def test_a_request_is_run_lost_run_again_closed_and_forgotten() -> None:
    requests: DeviceRequests[Held] = DeviceRequests()
    r = held()
    assert requests.admit(r) == RequestArrived(r.request())
    requests.dispatch(r, OLD)
    assert requests.run_by(OLD) == [r] and requests.running(OLD) == 1
    requests.lose(r)
    r.delivered_tokens = 7
    assert requests.admit(r) == AttemptLost(r.id, 7)
    requests.dispatch(r, NEW)
    assert (requests.running(OLD), requests.running(NEW)) == (0, 1)
    assert requests.close(r, 5.0) == Finished(r.id)
    assert requests.running(NEW) == 0
    assert requests.forget(r, 6.0) is None, "the scheduler heard of its end already"
    assert not len(requests)


def test_what_the_scheduler_has_is_told_when_it_goes_and_what_it_has_not_is_not() -> None:
    requests: DeviceRequests[Held] = DeviceRequests()
    waiting, asking, running, lost = (held(name) for name in "warl")
    requests.ask(asking)
    for r in (waiting, running, lost):
        requests.admit(r)
    for r in (running, lost):
        requests.dispatch(r, OLD)
    requests.lose(lost)
    assert [requests.cancel(r, 1.0) for r in (waiting, asking, running)] == [
        RequestCancelled(waiting.id),
        None,
        RequestCancelled(running.id),
    ]
    assert requests.forget(lost, 1.0) == Finished(lost.id)
    assert all(requests.forget(r, 1.0) is None for r in (waiting, asking, running))
    assert requests.running(OLD) == 0


def test_a_rejected_dispatch_waits_again() -> None:
    requests: DeviceRequests[Held] = DeviceRequests()
    r = held()
    requests.admit(r)
    requests.dispatch(r, OLD)
    assert requests.reject_dispatch(r) == DispatchRejected(r.id)
    assert r.stage is Stage.WAITING and r.instance is None


def test_a_model_rests_from_the_last_token_of_its_last_request() -> None:
    requests: DeviceRequests[Held] = DeviceRequests()
    assert requests.idle_s(M, 9.0) == 0.0, "it was never here"
    requests.came_up(M, 1.0)
    assert requests.idle_s(M, 3.0) == 2.0
    first, second = held("a"), held("b")
    for r in (first, second):
        requests.admit(r)
    requests.dispatch(first, OLD)
    requests.close(first, 5.0)
    assert requests.idle_s(M, 6.0) == 0.0, "the other one waits"
    requests.give_up(second, 7.0)
    requests.forget(second, 8.0)
    assert requests.idle_s(M, 9.0) == 2.0
    requests.forget(first, 9.0)
    assert requests.idle_s(M, 9.0) == 2.0, "that the client has it all does not count"


ACTS: dict[str, Callable[[DeviceRequests[Held], Held], object]] = {
    "ask": lambda d, r: d.ask(r),
    "admit": lambda d, r: d.admit(r),
    "dispatch": lambda d, r: d.dispatch(r, OLD),
    "reject": lambda d, r: d.reject_dispatch(r),
    "lose": lambda d, r: d.lose(r),
    "close": lambda d, r: d.close(r, 1.0),
    "give_up": lambda d, r: d.give_up(r, 1.0),
    "cancel": lambda d, r: d.cancel(r, 1.0),
}
ALLOWED = {
    Stage.NEW: {"ask", "admit", "cancel", "give_up"},
    Stage.ASKING: {"admit", "cancel", "give_up"},
    Stage.WAITING: {"dispatch", "cancel", "give_up"},
    Stage.RUNNING: {"reject", "lose", "close", "cancel", "give_up"},
    Stage.LOST: {"admit", "cancel", "give_up"},
    Stage.CLOSING: {"admit", "cancel", "give_up"},
    Stage.ENDED: set(),
}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(sorted(ACTS))), max_size=40))
def test_nothing_else_can_happen_and_the_books_stay_right(acts: list[tuple[int, str]]) -> None:
    requests: DeviceRequests[Held] = DeviceRequests()
    all_of_them = [held(name) for name in "abc"]
    for index, act in acts:
        r = all_of_them[index]
        if act in ALLOWED[r.stage]:
            ACTS[act](requests, r)
        else:
            stage = r.stage
            with pytest.raises(ImpossibleTransition, match=stage.name):
                ACTS[act](requests, r)
            assert r.stage is stage
        running = [r for r in all_of_them if r.stage is Stage.RUNNING]
        assert requests.running(OLD) == len(running) and all(r.instance == OLD for r in running)
        done = (Stage.NEW, Stage.CLOSING, Stage.ENDED)
        used = any(r.stage not in done for r in all_of_them)
        assert (requests.idle_s(M, 100.0) == 0.0) == (used or not any(r.id in requests for r in all_of_them)) or (
            requests.idle_s(M, 100.0) == 99.0 and not used
        )


SERVE, STOP, END = InstanceStep.SERVE, InstanceStep.STOP_ADMITTING, InstanceStep.END


def active() -> InstanceLife:
    life = InstanceLife()
    assert life.loaded(0.0) == (SERVE,) and life.serves
    return life


def test_an_instance_drains_until_nothing_runs() -> None:
    life = active()
    assert life.leave(carry=False, running=2, now_s=1.0) == (STOP,)
    assert life.state is InstanceState.DRAINING
    assert life.leave(carry=False, running=2, now_s=2.0) == ()
    assert life.pass_time(2.0) == ()
    assert life.emptied() == (END,)
    assert life.gone and life.emptied() == life.leave(True, 0, 3.0) == life.pass_time(1e9) == ()


def test_an_instance_without_requests_ends_at_once_and_so_does_one_that_carries_over() -> None:
    assert active().leave(carry=False, running=0, now_s=1.0) == (STOP, END)
    assert active().leave(carry=True, running=2, now_s=1.0) == (STOP, END)
    life = active()
    life.leave(carry=False, running=2, now_s=1.0)
    assert life.leave(carry=True, running=2, now_s=2.0) == (END,)


def test_a_drain_that_takes_too_long_carries_over() -> None:
    life = active()
    life.leave(carry=False, running=1, now_s=1.0)
    assert life.drained_by_s == 1.0 + DRAIN_S
    assert life.pass_time(life.drained_by_s) == (END,)


def test_what_is_told_to_leave_while_it_loads_leaves_when_it_is_loaded() -> None:
    life = InstanceLife()
    assert life.leave(carry=False, running=0, now_s=1.0) == ()
    assert not life.serves and life.state is InstanceState.LOADING
    assert life.loaded(2.0) == (SERVE, STOP, END)


def test_what_is_lost_does_nothing_more() -> None:
    life = active()
    assert life.emptied() == (), "it serves on"
    life.lost()
    assert life.gone and not life.serves
    assert life.leave(False, 0, 1.0) == life.loaded(1.0) == ()
