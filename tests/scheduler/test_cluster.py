"""The cluster scheduler's rules one by one, each in a small world."""

from __future__ import annotations

from itertools import pairwise

import pytest

from prism.core.effects import Activate, Deactivate, RefuseWaiting, Route
from prism.core.events import (
    ActivationError,
    Arrivals,
    CatalogChanged,
    DeviceReport,
    InstanceFound,
    ModelLoad,
    OperatorDrain,
    OperatorLoad,
    OperatorUnload,
    PinChanged,
    WaitingRequests,
)
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings, MigrationTest
from prism.core.specs import ModelSpec
from prism.scheduler.planning import plan
from tests.scheduler.cluster_world import World, model_spec, node_devices

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")
GB0, GB1 = DeviceId("n/host:0"), DeviceId("n/host:1")
QUIET = ClusterSettings(rebalance_every_s=0.0)


def world(*catalog: ModelSpec, devices: int = 1, settings: ClusterSettings = QUIET) -> World:
    w = World(settings, list(catalog))
    w.join(*node_devices("n", devices))
    return w


def serve(w: World, model: ModelName, count: int = 1) -> None:
    """``count`` requests for the model come and are answered."""
    w.arrive(model, count)
    w.pass_time(0.5)
    w.step()
    w.step()


def reasons(w: World, kind: type) -> list[tuple[str, ReasonCode]]:
    return [(e.model, e.reason.code) for _, e in w.log if isinstance(e, kind) and not isinstance(e, Route)]


def on(w: World, model: ModelName) -> tuple[DeviceId, ...]:
    return next(i.devices for k, i in w.live.items() if k[0] == model and i.state == "active")


def test_a_request_wakes_its_model_on_the_device_with_the_least_pressure() -> None:
    w = world(model_spec("a", 300), model_spec("b", 300), model_spec("c", 300), devices=2)
    for model in (A, A, A, B):
        serve(w, model)
    assert (on(w, A), on(w, B)) == ((GB0,), (GB1,))
    serve(w, C)
    assert on(w, C) == (GB1,), "b has fewer requests than a"
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


def test_a_starving_model_drives_out_one_that_never_rests() -> None:
    w = world(model_spec("a", 600), model_spec("b", 600, max_wait_s=20.0))
    serve(w, A)
    w.arrive(A)
    w.report(GB0)
    w.arrive(B)
    while not reasons(w, Deactivate):
        w.arrive(A)
        w.report(GB0)
        w.pass_time(0.5)
        assert w.now < 15.0
    assert reasons(w, Deactivate) == [("a", ReasonCode.STARVATION)]
    assert [e.carry for _, e in w.log if isinstance(e, Deactivate)] == [True], "its requests move on with their tokens"
    w.step()
    assert (B, Generation(2)) in w.live


def test_waiting_ends_at_the_starvation_bound_when_nothing_may_leave() -> None:
    w = world(model_spec("a", 600, pinned=True), model_spec("b", 600, max_wait_s=20.0))
    w.pass_time(0.5)
    w.step()
    w.arrive(B)
    w.pass_time(19.0)
    assert not reasons(w, RefuseWaiting)
    w.pass_time(2.0)
    refusal = next(e for _, e in w.log if isinstance(e, RefuseWaiting))
    assert refusal.reason.code is ReasonCode.NO_ROOM
    assert refusal.retry_after_s is not None and refusal.retry_after_s >= 1.0


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
            if instance.state == "activating":
                started.append(w.now)
                w.failed(key, ActivationError.ENGINE_DIED)
        w.pass_time(0.1)
    pauses = [b - a for a, b in pairwise(started)]
    assert pauses == pytest.approx([1.0, 2.0], abs=0.15)
    refusal = next(e for _, e in w.log if isinstance(e, RefuseWaiting))
    assert refusal.retry_after_s == pytest.approx(4.0)
    assert "engine_died" in refusal.detail


def test_memory_that_was_not_there_sends_the_model_elsewhere() -> None:
    w = world(model_spec("a", 300), devices=2)
    w.arrive(A)
    w.failed((A, Generation(1)), ActivationError.NO_MEMORY)
    w.pass_time(0.2)
    assert [e.devices for _, e in w.log if isinstance(e, Activate)] == [(GB0,), (GB1,)]


def test_keep_alive_ends_an_idle_model_and_only_that() -> None:
    w = world(model_spec("a", 300, keep_alive_s=5.0), model_spec("b", 300))
    serve(w, A)
    serve(w, B)
    w.pass_time(4.0)
    serve(w, A)
    w.pass_time(4.9)
    assert not reasons(w, Deactivate)
    w.pass_time(0.2)
    assert reasons(w, Deactivate) == [("a", ReasonCode.KEEP_ALIVE)]


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


def test_draining_a_device_moves_what_is_in_use_and_drops_what_is_idle() -> None:
    w = world(model_spec("a", 300), model_spec("b", 300), devices=2, settings=QUIET)
    serve(w, A)
    w.send(OperatorLoad(B, (GB0,)))
    w.pass_time(0.5)
    w.step()
    w.arrive(A)
    w.report(GB0)
    w.drained.add(GB0)
    w.send(OperatorDrain(GB0))
    assert reasons(w, Activate)[-1] == ("a", ReasonCode.DRAIN)
    assert reasons(w, Deactivate) == [("b", ReasonCode.DRAIN)]
    w.pass_time(0.5)
    w.activated((A, Generation(3)))
    assert w.routes[A] == (GB1,)
    assert reasons(w, Deactivate)[-1] == ("a", ReasonCode.MIGRATED)
    assert not [e for _, e in w.log if isinstance(e, Deactivate) and e.carry], "running requests finish where they are"


def test_a_pressed_device_sheds_a_model_to_an_empty_one() -> None:
    settings = ClusterSettings(rebalance_every_s=5.0, planning_window_s=8.0)
    w = world(model_spec("a", 300), model_spec("b", 300), settings=settings)
    serve(w, A)
    serve(w, B)
    w.join(*node_devices("x", 1))
    for _ in range(60):
        w.arrive(A, 3)
        w.arrive(B, 2)
        loads = tuple(ModelLoad(k[0], k[1], 300, 180, 0, 5, 3, 9) for k in w.live if w.live[k].devices == (GB0,))
        w.send(DeviceReport(GB0, 1000, 100, loads))
        w.pass_time(0.5)
        for key, instance in list(w.live.items()):
            if instance.state == "activating":
                w.activated(key)
    moved = [e for _, e in w.log if isinstance(e, Activate) and e.reason.code is ReasonCode.MIGRATION]
    assert len(moved) == 1
    assert moved[0].devices == (DeviceId("x/host:0"),)
    assert w.routes[moved[0].model] == moved[0].devices


@pytest.mark.parametrize(("migration", "moves"), [(MigrationTest.COST_AWARE, 0), (MigrationTest.PAPER, 1)])
def test_without_pressure_only_the_papers_threshold_moves_a_model(migration: MigrationTest, moves: int) -> None:
    w = world(
        model_spec("a", 300), model_spec("b", 300), settings=ClusterSettings(migration=migration, planning_window_s=5.0)
    )
    serve(w, A, 5)
    serve(w, B, 4)
    w.join(*node_devices("x", 1))
    w.pass_time(20.0)
    assert w.migrations == moves


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
    w.scheduler.on_event(InstanceFound(A, Generation(7), (GB0,)), 1.0)
    effects = w.scheduler.on_event(InstanceFound(ModelName("ghost"), Generation(8), (GB0,)), 1.0)
    assert [e.reason.code for e in effects if isinstance(e, Deactivate)] == [ReasonCode.STALE]
    effects = w.scheduler.on_event(WaitingRequests(A, 1, 1.0), 1.0)
    assert effects == [Route(A, (GB0,))]


def test_too_many_waiting_requests_are_refused_from_the_young_end() -> None:
    w = world(model_spec("a", 300), settings=ClusterSettings(max_waiting=10))
    w.arrive(A, 12)
    refusal = next(e for _, e in w.log if isinstance(e, RefuseWaiting))
    assert (refusal.keep, w.refused, len(w.inactive[A])) == (10, 2, 10)
    assert reasons(w, Activate) == [("a", ReasonCode.DEMAND)]


def test_idle_neighbours_leave_when_requests_wait_for_memory() -> None:
    w = world(model_spec("a", 300), model_spec("b", 300))
    serve(w, B)
    serve(w, A)
    w.pass_time(30.0)
    for _ in range(10):
        w.send(Arrivals(A, 5))
        a, b = (A, Generation(2)), (B, Generation(1))
        loads = (ModelLoad(*a, 300, 390, 0, 9, 4, 9), ModelLoad(*b, 300, 0, 0, 0, 0, 1))
        w.send(DeviceReport(GB0, 1000, 10, loads if b in w.live and w.live[b].state == "active" else loads[:1]))
        w.pass_time(1.0)
    assert reasons(w, Deactivate) == [("b", ReasonCode.KV_PRESSURE)]


def _load(w: World, model: ModelName, running: int, waiting: int) -> None:
    """One second in which the model's requests fill its instances and ``waiting`` more wait at each."""
    w.pass_time(1.0)
    w.send(Arrivals(model, 4))
    for key, instance in list(w.live.items()):
        if instance.state == "active" and key[0] == model:
            load = ModelLoad(model, key[1], 300, 100, 0, running, waiting, 9)
            w.send(DeviceReport(instance.devices[0], 1000, 500, (load,)))


def test_a_model_that_one_device_cannot_serve_gets_replicas_in_free_room_and_loses_them_again() -> None:
    w = world(model_spec("a", 300), devices=3)
    serve(w, A)
    for _ in range(6):
        _load(w, A, 20, 12)
    assert reasons(w, Activate) == [("a", ReasonCode.DEMAND), ("a", ReasonCode.SCALE_OUT)]
    for key in list(w.live):
        w.activated(key)
    assert w.routes[A] == (GB0, GB1)
    for _ in range(90):  # the rate falls: one instance is enough again
        w.pass_time(1.0)
        for device in list(w.devices):
            w.report(device)
    assert reasons(w, Deactivate) == [("a", ReasonCode.SCALE_IN)]
    assert len(w.routes[A]) == 1


def test_a_replica_is_the_first_to_make_room() -> None:
    w = world(model_spec("a", 300), model_spec("b", 800), devices=2)
    serve(w, A)
    for _ in range(6):
        _load(w, A, 20, 12)
    for key in list(w.live):
        w.activated(key)
    for _ in range(3):
        _load(w, A, 20, 12)
    w.arrive(B)
    assert reasons(w, Deactivate)[-1] == ("a", ReasonCode.SCALE_IN)


def test_a_model_with_busy_neighbours_has_time_to_move_before_it_gets_a_replica() -> None:
    w = world(model_spec("a", 300), model_spec("b", 300), settings=ClusterSettings())
    serve(w, B)
    serve(w, A)
    w.join(*node_devices("x", 1))
    for _ in range(6):
        w.send(Arrivals(B, 4))
        _load(w, A, 20, 12)
    assert ReasonCode.SCALE_OUT not in [code for _, code in reasons(w, Activate)]


def test_an_idle_model_leaves_when_a_request_finds_no_room_beside_its_weights() -> None:
    """Nothing runs and no KV is in use, so the device does not look full: one request (retracted, or too large for what
    the idle neighbour leaves) would stand there for ever."""
    w = world(model_spec("a", 300), model_spec("b", 300), devices=1)
    serve(w, B)
    serve(w, A)
    a, b = (A, Generation(2)), (B, Generation(1))
    w.pass_time(60.0)
    for _ in range(8):
        w.pass_time(1.0)
        loads = (ModelLoad(*a, 300, 0, 0, 1, 0, 9), ModelLoad(*b, 300, 0, 0, 0, 0, 1))
        w.send(DeviceReport(GB0, 1000, 400, loads if b in w.live and w.live[b].state == "active" else loads[:1]))
    assert reasons(w, Deactivate) == [("b", ReasonCode.KV_PRESSURE)]


def test_a_starving_model_claims_a_device_that_newcomers_may_not_take() -> None:
    """a and b take turns on the device, so that big never finds both gone; the claim ends that."""
    big, bound_s = ModelName("big"), 20.0
    w = world(*(model_spec(name, 400) for name in "abc"), model_spec("big", 900, max_wait_s=bound_s))
    serve(w, A)
    serve(w, B)
    w.arrive(big)
    since_s, placed = w.now, []
    while not placed and w.now < since_s + bound_s:
        for model in (A, B):
            w.arrive(model)
        w.pass_time(0.3)
        w.step()
        placed = [code for name, code in reasons(w, Activate) if name == "big"]
    assert placed == [ReasonCode.DEMAND]
    assert w.now - since_s <= bound_s / 2 + 1.0 + QUIET.min_residency_s


def test_a_claim_is_what_plan_shows_and_it_ends_with_its_requests() -> None:
    w = world(model_spec("a", 400), model_spec("b", 400), model_spec("big", 900, max_wait_s=20.0))
    big = ModelName("big")
    w.arrive(A)  # loads for ever
    w.arrive(big)
    w.pass_time(11.0)
    (waits,) = [d for d in plan(w.scheduler, w.now) if d.model == big]
    assert (waits.action, waits.reason.code) == ("wait", ReasonCode.CLAIM)
    w.arrive(B)
    assert reasons(w, Activate) == [("a", ReasonCode.DEMAND)], "the room beside a is kept for big"
    w.inactive.pop(big)
    w.send(WaitingRequests(big, 0, float("inf")))
    w.finished += 1  # its client went away
    w.pass_time(0.2)
    assert reasons(w, Activate) == [("a", ReasonCode.DEMAND), ("b", ReasonCode.DEMAND)]


def test_a_drain_that_a_starving_model_waits_for_is_hurried() -> None:
    w = world(model_spec("a", 600), model_spec("b", 600, max_wait_s=20.0))
    serve(w, A)
    w.pass_time(30.0)
    w.arrive(B)  # a is idle and told to leave, but a request has just reached it
    w.live[(A, Generation(1))].running.append(w.now)
    w.arrived += 1
    w.pass_time(9.0)
    assert [e.carry for _, e in w.log if isinstance(e, Deactivate)] == [False]
    w.pass_time(2.0)
    assert [e.carry for _, e in w.log if isinstance(e, Deactivate)] == [False, True]
    assert reasons(w, Deactivate)[-1] == ("a", ReasonCode.STARVATION)


def test_memory_that_is_never_there_is_made_by_evicting_and_then_counts_as_a_failure() -> None:
    """The books say that b fits beside a; the device says no."""
    w = world(model_spec("a", 300), model_spec("b", 300, max_wait_s=20.0))
    serve(w, A)
    w.arrive(B)
    tries = []
    while not reasons(w, RefuseWaiting) and w.now < 100.0:
        for key, instance in list(w.live.items()):
            if instance.state == "activating":
                tries.append((w.now, len(w.live)))
                w.failed(key, ActivationError.NO_MEMORY)
        w.pass_time(0.25)
        for key, instance in list(w.live.items()):
            if instance.state == "draining":
                w.gone(key)
    assert ("a", ReasonCode.MAKE_ROOM) in reasons(w, Deactivate), "what leaves makes the room that was promised"
    assert sum(others > 1 for _, others in tries) <= 6, "not tried in vain beside a for ever"
    assert reasons(w, RefuseWaiting)[-1] == ("b", ReasonCode.ACTIVATION_FAILED)
