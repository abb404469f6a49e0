"""Further instances of a model: where memory is free or spare ones have it, and when spare ones leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.effects import Activate, Deactivate
from prism.core.events import (
    Arrivals,
    DeviceReport,
    InstanceLoad,
    OperatorUnload,
)
from prism.core.ids import DeviceId
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings
from prism.scheduler.victims import Pressing, Victims
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import GB0, GB1, QUIET, A, B, C, on, reasons, report_load, serve, world


def test_a_model_that_one_device_cannot_serve_gets_replicas_in_free_room_and_loses_them_again() -> None:
    w = world(model_spec("a", 300), devices=3, settings=replace(QUIET, standing_replicas=False))
    serve(w, A)
    for _ in range(6):
        report_load(w, A, 20, 12)
    assert reasons(w, Activate) == [("a", ReasonCode.DEMAND)] + 2 * [("a", ReasonCode.SCALE_OUT)], "all at once"
    for key in list(w.live):
        w.activated(key)
    assert w.routes[A] == (GB0, GB1, DeviceId("n/host:2"))
    for _ in range(90):  # the rate falls: one instance is enough again
        w.pass_time(1.0)
        for device in list(w.devices):
            w.report(device)
        for key in [k for k, i in w.live.items() if i.state == "draining"]:
            w.gone(key)
    assert reasons(w, Deactivate) == 2 * [("a", ReasonCode.SCALE_IN)]
    assert len(w.routes[A]) == 1


def test_a_replica_is_the_first_to_make_room() -> None:
    w = world(model_spec("a", 300), model_spec("b", 800), devices=2)
    serve(w, A)
    for _ in range(6):
        report_load(w, A, 20, 12)
    for key in list(w.live):
        w.activated(key)
    for _ in range(3):
        report_load(w, A, 20, 12)
    w.arrive(B)
    assert reasons(w, Deactivate)[-1] == ("a", ReasonCode.SCALE_IN)


def test_a_model_whose_requests_wait_gets_a_replica_at_once_whatever_weights_idle_models_have_elsewhere() -> None:
    """It shares its device with a busy model, and the other one is fuller, of idle models: they slow nobody down."""
    w = world(model_spec("a", 200), model_spec("b", 200), model_spec("c", 600), settings=ClusterSettings())
    serve(w, B)
    serve(w, A)
    w.join(*node_devices("x", 1))
    serve(w, C)
    assert on(w, C) == (DeviceId("x/host:0"),)
    w.send(Arrivals(B, 4))
    report_load(w, A, 20, 12)
    assert reasons(w, Activate)[-1] == ("a", ReasonCode.SCALE_OUT)


def _burst(w: World) -> None:
    """Requests of ``a`` wait until it has a second instance, and then none comes any more."""
    serve(w, A)
    report_load(w, A, 20, 12)
    for key in list(w.live):
        w.activated(key)
    assert len(w.routes[A]) == 2
    for _ in range(20):
        w.pass_time(1.0)
        w.step()


def test_what_a_burst_has_needed_stays_where_memory_is_free_and_comes_back_when_it_is_free_again() -> None:
    w = world(model_spec("a", 300), model_spec("b", 800), devices=2, settings=ClusterSettings())
    _burst(w)
    assert len(w.routes[A]) == 2, "nobody needs the memory"
    w.arrive(B)
    left = [e for _, e in w.log if isinstance(e, Deactivate)]
    assert [(e.model, e.reason.code) for e in left] == [("a", ReasonCode.SCALE_IN)], "at once, nobody else is evicted"
    w.step()
    w.pass_time(0.6)
    w.step()
    assert on(w, B) and len(w.routes[A]) == 1
    w.pass_time(70.0)
    w.step()
    assert reasons(w, Activate)[-1] == ("b", ReasonCode.DEMAND), "there is no free memory for it"
    w.send(OperatorUnload(B))
    for _ in range(90):
        w.pass_time(1.0)
        w.step()
    assert reasons(w, Activate)[-1] == ("a", ReasonCode.STANDING)
    assert len(w.routes[A]) == 2


def test_a_model_that_waits_next_to_spare_instances_takes_their_memory_at_once() -> None:
    """Even in use, and although it could wait: the instance's model serves on elsewhere."""
    w = world(model_spec("a", 300), model_spec("b", 800, slo_ttft_s=1000.0), devices=2)
    _burst(w)
    w.arrive(A, 8)
    w.report(GB0)
    w.report(GB1)
    w.arrive(B)
    assert reasons(w, Deactivate)[-1] == ("a", ReasonCode.SCALE_IN)


@pytest.mark.parametrize("whose", ["its own", "a neighbour's", "everybody's"])
def test_a_spare_instance_whose_own_requests_wait_for_memory_does_not_make_room_for_them(whose: str) -> None:
    """They would only wait elsewhere: a burst lost the instances that it had just got (13B in 80 GB, whose KV fills
    them at once). It leaves for a neighbour's, unless requests wait at its model's other instance as well."""
    w = world(model_spec("a", 300), model_spec("b", 300), devices=2)
    serve(w, B)
    _burst(w)
    w.pass_time(30.0)
    home, spare = sorted(key for key in w.live if key.model == A)
    (device,) = w.live[spare].devices
    beside = [key for key in w.live if device in w.live[key].devices and key.model == B]
    assert beside, "b stands beside the youngest instance"
    if whose == "everybody's":
        waits = InstanceLoad(home, 300, 100, 0, 5, 9, 50, waited_s=2.0)
        w.send(DeviceReport(w.live[home].devices[0], 1000, 0, (waits,)))
    loads = [InstanceLoad(spare, 300, 600, 0, 5, 0 if whose == "a neighbour's" else 9, 50, waited_s=2.0)]
    loads += [InstanceLoad(key, 300, 100, 0, 3, 0 if whose == "its own" else 9, 50, waited_s=2.0) for key in beside]
    w.send(DeviceReport(device, 1000, 0, tuple(loads), memory_short_s=2.0))
    left = [(e.key, e.reason.code) for _, e in w.log if isinstance(e, Deactivate)]
    assert ((spare, ReasonCode.SCALE_IN) in left) == (whose == "a neighbour's")


def test_a_busy_spare_instance_is_dearer_where_requests_wait_at_its_models_others() -> None:
    w = world(model_spec("a", 300), devices=2)
    _burst(w)
    w.pass_time(30.0)

    def regret(waiting: int) -> float:
        """Of the younger instance's leaving, when so many requests have waited for long at both."""
        for key in sorted(w.live):
            (device,) = w.live[key].devices
            load = InstanceLoad(key, 300, 100, 0, 5, waiting, 50, waited_s=2.0 * (waiting > 0))
            w.send(DeviceReport(device, 1000, 0, (load,)))
        (spare,) = Victims(w.scheduler.books).on(device, Pressing.WOULD_BE_LATE, w.now)
        return spare.regret

    assert 0.0 < regret(0) < regret(9)


def test_a_burst_takes_the_memory_of_another_models_idle_spare_instance() -> None:
    w = world(model_spec("a", 400), model_spec("b", 550), devices=2)
    _burst(w)
    serve(w, B)
    assert len(w.routes[A]) == 1
    w = world(model_spec("a", 300), model_spec("b", 400), devices=2)
    serve(w, B)
    _burst(w)
    report_load(w, B, 20, 12)
    assert reasons(w, Activate)[-1] == ("b", ReasonCode.SCALE_OUT)
