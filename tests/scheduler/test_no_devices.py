"""Without any machine requests wait for one, each for its bound in all and no longer."""

from __future__ import annotations

from prism.core.effects import RefuseWaiting
from prism.core.ids import NodeId
from prism.core.reasons import ReasonCode
from tests.scheduler.cluster_world import model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import A, reasons, world


def test_a_wait_counts_from_the_arrival_whatever_was_lost_meanwhile() -> None:
    w = world(model_spec("a", 100, max_wait_s=20.0))
    w.arrive(A)
    w.pass_time(0.5)
    w.step()  # it runs
    w.pass_time(14.0)
    w.lose(NodeId("n"))  # and waits again
    w.pass_time(4.0)
    assert not reasons(w, RefuseWaiting)
    w.pass_time(2.0)
    assert reasons(w, RefuseWaiting) == [("a", ReasonCode.NO_DEVICES)]
    w.check()


def test_a_machine_that_comes_in_time_serves_it() -> None:
    w = world(model_spec("a", 100, max_wait_s=20.0))
    w.lose(NodeId("n"))
    w.arrive(A)
    w.pass_time(19.0)
    w.join(*node_devices("m", 1))
    for _ in range(3):
        w.pass_time(0.5)
        w.step()
    assert w.finished == 1 and not reasons(w, RefuseWaiting)
