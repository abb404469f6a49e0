"""When a model's keep-alive is over: decided on what its node says, whenever that is heard."""

from __future__ import annotations

import pytest

from prism.core.effects import Deactivate
from prism.core.events import OperatorLoad, PinChanged
from prism.core.ids import Generation
from prism.core.reasons import ReasonCode
from prism.scheduler.keepalive import due_in_s
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.small_world import GB0, GB1, A, B, reasons, serve, world

LEFT = [("a", ReasonCode.KEEP_ALIVE)]


def after(w: World, seconds: float) -> list[tuple[str, ReasonCode]]:
    """Time passes, every device reports: who was told to leave?"""
    w.pass_time(seconds)
    for device in list(w.devices):
        w.report(device)
    return reasons(w, Deactivate)


def test_it_ends_an_idle_model_and_only_that() -> None:
    w = world(model_spec("a", 300, keep_alive_s=5.0), model_spec("b", 300))
    serve(w, A)
    serve(w, B)
    w.pass_time(4.0)
    serve(w, A)
    assert not after(w, 4.9)
    assert after(w, 0.1) == LEFT


@pytest.mark.parametrize("heard_s", [0.0, 0.2, 0.7, 3.0, 4.9])
def test_it_does_not_matter_when_the_controller_first_hears_that_the_model_is_idle(heard_s: float) -> None:
    w = world(model_spec("a", 300, keep_alive_s=5.0))
    serve(w, A)
    w.arrive(A)
    w.report(GB0)  # it is in use, as far as the controller knows
    w.serve((A, Generation(1)))
    assert not after(w, heard_s)
    w.pass_time(4.99 - heard_s)
    assert not reasons(w, Deactivate)
    assert after(w, 0.01) == LEFT
    [reason] = [e.reason for _, e in w.log if isinstance(e, Deactivate)]
    assert dict(reason.numbers)["idle_s"] == pytest.approx(5.0)


def test_time_alone_ends_nothing() -> None:
    """A request may have come since the last report, straight from a front door."""
    w = world(model_spec("a", 300, keep_alive_s=5.0))
    serve(w, A)
    w.pass_time(20.0)
    assert not reasons(w, Deactivate)
    w.live[A, Generation(1)].used_s = w.now - 1.0  # and the report that counted it was lost
    assert not after(w, 3.9)
    assert after(w, 0.1) == LEFT


def test_who_must_not_leave_when_it_is_over_leaves_once_it_may() -> None:
    w = world(model_spec("a", 300, keep_alive_s=5.0, pinned=True))
    w.pass_time(0.5)
    w.step()
    assert not after(w, 20.0)
    w.pinned.discard(A)
    w.send(PinChanged(A, False))
    assert after(w, 0.0) == LEFT


def test_instances_of_a_model_leave_together_when_none_was_used() -> None:
    w = world(model_spec("a", 300, keep_alive_s=5.0), devices=2)
    w.send(OperatorLoad(A, (), 2))
    w.pass_time(0.5)
    w.step()
    assert set(w.routes[A]) == {GB0, GB1}
    w.pass_time(3.0)
    w.live[A, Generation(2)].running.append(w.now)
    w.serve((A, Generation(2)))
    assert not after(w, 2.0)
    assert not after(w, 2.9)
    assert after(w, 0.1) == LEFT * 2


def test_a_report_is_due_when_the_first_keep_alive_may_end() -> None:
    assert due_in_s([]) == due_in_s([(3.0, None)]) == float("inf")
    assert due_in_s([(0.0, 4.0), (1.5, 5.0), (9.0, None)]) == 3.5
    assert due_in_s([(5.0, 5.0), (6.0, 5.0)]) == float("inf"), "it was reported then"
    assert due_in_s([(5.0 - 1e-9, 5.0)]) == float("inf"), "as good as over, no reason for another report"
