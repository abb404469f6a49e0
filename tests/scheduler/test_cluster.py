"""The cluster scheduler's rules one by one, each in a small world."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from prism.core.effects import Activate, Deactivate, RefuseWaiting, Route
from prism.core.events import (
    ActivationError,
    CatalogChanged,
    FleetKnown,
    InstanceFound,
    InstanceLost,
    NodeJoined,
    OperatorLoad,
    OperatorUnload,
    PinChanged,
    Tick,
    WaitingRequests,
)
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings, Placement
from prism.core.views import InstanceState
from prism.scheduler import cluster_scheduler
from tests.scheduler.cluster_world import model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import GB0, GB1, QUIET, A, B, C, on, reasons, serve, world


def test_a_request_wakes_its_model_on_the_device_with_the_least_pressure() -> None:
    """By Algorithm 1; by work: test_relief.py."""
    settings = replace(QUIET, placement=Placement.KVPR)
    w = world(model_spec("a", 300), model_spec("b", 300), model_spec("c", 300), devices=2, settings=settings)
    for model in (A, A, A, B):
        serve(w, model)
    assert (on(w, A), on(w, B)) == ((GB0,), (GB1,))
    serve(w, C)
    assert on(w, C) == (GB1,), "b has fewer requests than a"
    w.check()


def test_expected_rates_decide_before_the_first_request() -> None:
    settings = ClusterSettings(rebalance_every_s=0.0, expected_rates=(("a", 9.0), ("b", 1.0)))
    w = world(model_spec("a", 300), model_spec("b", 300), model_spec("c", 300), devices=2, settings=settings)
    for model in (A, B, C):
        w.send(OperatorLoad(model))
        w.pass_time(0.5)
        w.step()
        w.step()
    assert (on(w, A), on(w, B), on(w, C)) == ((GB0,), (GB1,), (GB1,))
    w.check()


@pytest.mark.parametrize(("more_mib", "places"), [(50, (GB0, GB1, GB0, GB1, GB0)), (700, (GB0, GB1, GB1, GB1, GB1))])
def test_models_of_which_nothing_is_known_are_dealt_out_in_turn(more_mib: int, places: tuple[DeviceId, ...]) -> None:
    """Whatever they weigh, as who runs at the same time is not known; but where not all have ample room (a model of
    ``more_mib`` is not loaded yet) memory counts."""
    settings = ClusterSettings(rebalance_every_s=0.0)
    sizes = {"a": 400, "b": 50, "c": 200, "d": 100, "e": 50}
    others = (model_spec(name, mib) for name, mib in sizes.items())
    w = world(*others, model_spec("more", more_mib), devices=2, settings=settings)
    for name in sizes:
        w.send(OperatorLoad(ModelName(name)))
        w.pass_time(0.5)
        w.step()
        w.step()
    assert [on(w, ModelName(name)) for name in sizes] == [(place,) for place in places]
    w.check()


def test_once_a_request_has_come_models_are_not_dealt_out_in_turn() -> None:
    settings = ClusterSettings(rebalance_every_s=0.0)
    w = world(model_spec("a", 300), model_spec("b", 300), model_spec("c", 300), devices=2, settings=settings)
    for model in (A, B, C):
        serve(w, model)
    assert (on(w, A), on(w, B), on(w, C)) == ((GB0,), (GB1,), (GB1,))
    w.check()


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    w = world(*(model_spec(f"m{i}", 300) for i in range(500)))
    w.pass_time(100.0)
    assert not w.log
    assert w.scheduler.wake_s is None


def test_an_idle_model_makes_room_and_the_command_waits_until_it_is_gone() -> None:
    w = world(model_spec("a", 600), model_spec("b", 600))
    serve(w, A)
    w.pass_time(30.0)
    w.arrive(B)
    assert reasons(w, Deactivate) == [("a", ReasonCode.MAKE_ROOM)]
    assert reasons(w, Activate) == [("a", ReasonCode.DEMAND)], "b must wait for the memory"
    w.step()
    assert reasons(w, Activate)[-1] == ("b", ReasonCode.DEMAND)
    assert [e for _, e in w.log if isinstance(e, Route)][1].devices == (), "a's route ends before it leaves"


def test_the_larger_objective_leaves_first_in_the_papers_order() -> None:
    from prism.core.settings import EvictionOrder

    settings = ClusterSettings(rebalance_every_s=0.0, eviction=EvictionOrder.PAPER)
    catalog = [model_spec("a", 400, slo_ttft_s=1.0), model_spec("b", 400, slo_ttft_s=9.0), model_spec("c", 400)]
    w = world(*catalog, settings=settings)
    serve(w, A)
    serve(w, B)
    w.pass_time(60.0)
    w.arrive(C)
    assert reasons(w, Deactivate) == [("b", ReasonCode.MAKE_ROOM)]


def test_the_model_that_comes_back_soonest_stays() -> None:
    w = world(model_spec("a", 400), model_spec("b", 400), model_spec("c", 400))
    for _ in range(8):  # a comes every 5 s, b came every 40 s
        for _ in range(8):
            serve(w, A)
            w.pass_time(4.5)
        serve(w, B)
    w.pass_time(3.5)
    serve(w, A)
    w.pass_time(2.0)
    w.arrive(C)
    w.pass_time(1.0)
    assert reasons(w, Deactivate) == [("b", ReasonCode.MAKE_ROOM)]


def test_a_model_is_not_evicted_before_it_has_served() -> None:
    w = world(model_spec("a", 600), model_spec("b", 600, max_wait_s=100.0))
    w.arrive(A)
    w.arrive(B)
    w.pass_time(0.5)
    w.step()  # a serves from now on, b still waits
    assert not reasons(w, Deactivate)
    w.step()
    w.pass_time(2.0)
    assert reasons(w, Deactivate) == [("a", ReasonCode.MAKE_ROOM)]


def test_a_model_too_large_for_every_device_is_refused_at_once_with_numbers() -> None:
    w = world(model_spec("a", 3000))
    w.arrive(A)
    refusal = next(e for _, e in w.log if isinstance(e, RefuseWaiting))
    assert refusal.reason.code is ReasonCode.NO_FEASIBLE_DEVICE
    assert dict(refusal.reason.numbers)["largest_device_bytes"] == 1000
    assert refusal.retry_after_s is None


def test_shards_go_to_different_devices_of_one_node() -> None:
    w = world(model_spec("a", 1200, tp=2))
    w.join(*node_devices("x", 2))
    w.arrive(A)
    activate = next(e for _, e in w.log if isinstance(e, Activate))
    assert activate.devices == (DeviceId("x/host:0"), DeviceId("x/host:1"))


@pytest.mark.parametrize("error", [ActivationError.WEIGHTS_CORRUPT, ActivationError.UNSUPPORTED])
def test_a_permanent_failure_refuses_for_good_until_the_entry_changes(error: ActivationError) -> None:
    w = world(model_spec("a", 300))
    w.arrive(A)
    w.failed((A, Generation(1)), error)
    w.arrive(A)
    assert [r for _, r in reasons(w, RefuseWaiting)] == [ReasonCode.ACTIVATION_FAILED] * 2
    assert all(e.retry_after_s is None for _, e in w.log if isinstance(e, RefuseWaiting))
    w.send(CatalogChanged((model_spec("a", 300),)))
    w.arrive(A)
    assert len(reasons(w, Activate)) == 2


def test_a_passing_failure_is_tried_again_with_growing_pauses_then_refused_with_retry_after() -> None:
    w = world(model_spec("a", 300))
    w.arrive(A)
    started = []
    while not reasons(w, RefuseWaiting):
        for key, instance in list(w.live.items()):
            if instance.state == "loading":
                started.append(w.now)
                w.failed(key, ActivationError.ENGINE_DIED)
        w.pass_time(0.1)
    pauses = [b - a for a, b in pairwise(started)]
    assert pauses == pytest.approx([1.0, 2.0], abs=0.15)
    refusal = next(e for _, e in w.log if isinstance(e, RefuseWaiting))
    assert refusal.retry_after_s == pytest.approx(4.0)
    assert "engine_died" in refusal.detail


def test_an_entry_whose_engine_dies_at_every_start_is_refused_at_once_in_the_engines_words() -> None:
    w = world(model_spec("a", 300))
    w.arrive(A)
    words = "RuntimeError: no logits"
    for generation in (1, 2, 3):
        assert not reasons(w, RefuseWaiting)
        key = InstanceKey(A, Generation(generation))
        w.activated(key)
        w.arrive(A)
        del w.live[key]
        w.send(InstanceLost(key, words))
        w.inactive[A] = [w.now]
        w.send(WaitingRequests(A, 1, w.now))
    refusal = next(e for _, e in w.log if isinstance(e, RefuseWaiting))
    assert refusal.reason.code is ReasonCode.ACTIVATION_FAILED and words in refusal.detail
    assert refusal.retry_after_s is None, "trying again at once is pointless"
    assert len(reasons(w, Activate)) == 3
    w.pass_time(0.5)
    w.arrive(A)
    assert len(reasons(w, Activate)) == 3, "not before the pause is over"
    w.pass_time(5.0)
    w.arrive(A)
    assert len(reasons(w, Activate)) == 4, "one more try after the pause"


def test_an_engine_that_served_or_was_killed_says_nothing_against_its_entry() -> None:
    w = world(model_spec("a", 300))
    w.arrive(A)
    for generation in range(1, 8):
        key = InstanceKey(A, Generation(generation))
        w.activated(key)
        w.serve(key)
        w.report(GB0)
        words = "" if generation % 2 else "RuntimeError: a poison request"
        del w.live[key]
        w.send(InstanceLost(key, words))
        w.arrive(A)
    assert not reasons(w, RefuseWaiting)


def test_memory_that_was_not_there_sends_the_model_elsewhere() -> None:
    w = world(model_spec("a", 300), devices=2)
    w.arrive(A)
    w.failed((A, Generation(1)), ActivationError.NO_MEMORY)
    w.pass_time(0.2)
    assert [e.devices for _, e in w.log if isinstance(e, Activate)] == [(GB0,), (GB1,)]


def test_pinned_models_load_at_once_and_stay() -> None:
    w = world(model_spec("a", 600, pinned=True, keep_alive_s=1.0), model_spec("b", 600))
    w.pass_time(0.5)
    w.step()
    assert reasons(w, Activate) == [("a", ReasonCode.PINNED)]
    w.arrive(B)
    w.pass_time(10.0)
    w.step()
    assert not reasons(w, Deactivate)
    w.pinned.discard(A)
    w.send(PinChanged(A, False))
    w.pass_time(1.0)
    assert reasons(w, Deactivate) == [("a", ReasonCode.MAKE_ROOM)]


def test_a_lost_node_is_replaced_where_there_is_room() -> None:
    w = world(model_spec("a", 600), model_spec("b", 600))
    w.join(*node_devices("x", 1))
    serve(w, A)
    serve(w, B)
    w.arrive(A)
    w.report(GB0)
    w.lose(NodeId("n"))
    assert w.routes[A] == ()
    assert len(reasons(w, Activate)) == 2, "b is in the way and has just served"
    w.pass_time(60.0)
    w.step()
    w.step()
    assert reasons(w, Activate)[-1][0] == "a"


def test_the_catalog_can_change_while_models_are_loaded() -> None:
    w = world(model_spec("a", 300), model_spec("b", 300))
    serve(w, A)
    serve(w, B)
    w.specs[A] = model_spec("a", 300, slo_ttft_s=5.0)
    w.send(CatalogChanged((w.specs[A],)))
    assert not reasons(w, Deactivate), "an objective needs no reload"
    w.specs[A] = model_spec("a", 350)
    w.send(CatalogChanged((w.specs[A],), (B,)))
    assert reasons(w, Deactivate) == [("a", ReasonCode.CATALOG), ("b", ReasonCode.CATALOG)]
    w.step()
    w.arrive(B)
    assert reasons(w, RefuseWaiting) == [("b", ReasonCode.UNKNOWN_MODEL)]
    serve(w, A)
    assert w.live[(A, Generation(3))].weight == 350


def test_operators_load_and_unload() -> None:
    w = world(model_spec("a", 300), devices=2)
    w.send(OperatorLoad(A, (GB1,)))
    w.pass_time(0.5)
    w.step()
    assert on(w, A) == (GB1,)
    w.send(OperatorUnload(A))
    w.step()
    assert not w.live
    serve(w, A)
    assert on(w, A) == (GB0,)


def test_a_new_scheduler_takes_over_what_runs_and_sends_away_what_nobody_knows() -> None:
    w = world(model_spec("a", 300))
    w.scheduler.on_event(InstanceFound(InstanceKey(A, Generation(7)), whole_model([GB0])), 1.0)
    effects = w.scheduler.on_event(
        InstanceFound(InstanceKey(ModelName("ghost"), Generation(8)), whole_model([GB0])), 1.0
    )
    assert [e.reason.code for e in effects if isinstance(e, Deactivate)] == [ReasonCode.STALE]
    effects = w.scheduler.on_event(WaitingRequests(A, 1, 1.0), 1.0)
    assert effects == [Route(A, (GB0,))]


def test_what_a_machine_brings_is_known_before_anything_is_decided_about_it() -> None:
    """A pinned model waits for a machine; the one that comes has it."""
    scheduler = cluster_scheduler(QUIET, [replace(model_spec("a", 300), pinned=True)])
    devices = node_devices("g", 2)
    there = InstanceFound(InstanceKey(A, Generation(7)), whole_model([devices[0].id]))
    effects = scheduler.on_event(NodeJoined(NodeId("g"), devices, (there,)), 1.0)
    assert effects == [Route(A, (devices[0].id,))]


def test_who_takes_over_decides_nothing_before_it_has_heard_the_fleet() -> None:
    spec = replace(model_spec("a", 300), pinned=True)
    scheduler = cluster_scheduler(QUIET, [spec, model_spec("b", 300)], takes_over=True)
    first, second = node_devices("g", 1), node_devices("h", 1)
    assert scheduler.on_event(NodeJoined(NodeId("g"), first), 0.0) == []
    assert scheduler.on_event(WaitingRequests(B, 1, 0.0), 0.1) == []
    there = InstanceFound(InstanceKey(A, Generation(7)), whole_model([second[0].id]))
    effects = scheduler.on_event(NodeJoined(NodeId("h"), second, (there,)), 0.2)
    assert effects == [Route(A, (second[0].id,))], "the pinned model is where it was, and nowhere else"
    started = [e for e in scheduler.on_event(FleetKnown(), 0.3) if isinstance(e, Activate)]
    assert [e.model for e in started] == [B], "whoever waited meanwhile"


def test_who_takes_over_waits_for_what_is_loading() -> None:
    """It is loaded once, its memory is promised, and it serves when its machine says so."""
    scheduler = cluster_scheduler(QUIET, [model_spec("a", 300)], takes_over=True)
    devices = node_devices("g", 2)
    loads = InstanceFound(InstanceKey(A, Generation(7)), whole_model([devices[0].id]), loading=True)
    assert scheduler.on_event(NodeJoined(NodeId("g"), devices, (loads,)), 0.0) == []
    assert scheduler.on_event(WaitingRequests(A, 1, 0.0), 0.1) == []
    assert scheduler.on_event(FleetKnown(), 0.2) == []
    assert [i.state for i in scheduler.books.models[A].instances] == [InstanceState.LOADING]
    assert scheduler.books.fleet.devices[devices[0].id].instances
    effects = scheduler.on_event(replace(loads, loading=False), 1.0)
    assert effects == [Route(A, (devices[0].id,))]
    assert scheduler.on_event(replace(loads, loading=False), 1.1) == []


def test_what_was_loading_for_who_takes_over_and_fails_is_tried_elsewhere() -> None:
    scheduler = cluster_scheduler(QUIET, [model_spec("a", 300)], takes_over=True)
    devices = node_devices("g", 2)
    loads = InstanceFound(InstanceKey(A, Generation(7)), whole_model([devices[0].id]), loading=True)
    scheduler.on_event(NodeJoined(NodeId("g"), devices, (loads,)), 0.0)
    scheduler.on_event(FleetKnown(), 0.1)
    scheduler.on_event(WaitingRequests(A, 1, 0.0), 0.2)
    effects = [*scheduler.on_event(InstanceLost(loads.key), 1.0)]
    for at_s in range(2, 20):
        effects += scheduler.on_event(Tick(), float(at_s))
    assert [(e.model, e.key.generation > 7) for e in effects if isinstance(e, Activate)] == [(A, True)]


def test_too_many_waiting_requests_are_refused_from_the_young_end() -> None:
    w = world(model_spec("a", 300), settings=ClusterSettings(max_waiting=10))
    w.arrive(A, 12)
    refusal = next(e for _, e in w.log if isinstance(e, RefuseWaiting))
    assert (refusal.keep, w.refused, len(w.inactive[A])) == (10, 2, 10)
    assert reasons(w, Activate) == [("a", ReasonCode.DEMAND)]
