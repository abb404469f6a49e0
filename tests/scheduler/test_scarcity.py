"""More is wanted than there is: who waits, who leaves, and when a starving model claims a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prism.core.effects import Activate, Deactivate, RefuseWaiting
from prism.core.events import (
    ActivationError,
    DeviceReport,
    InstanceLoad,
    WaitingRequests,
)
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings, MigrationTest
from prism.scheduler.planning import plan
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import GB0, QUIET, A, B, reasons, serve, world


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


def test_a_pressed_device_sheds_a_model_to_an_empty_one() -> None:
    """Where a further instance is no way out."""
    settings = ClusterSettings(rebalance_every_s=5.0, planning_window_s=8.0, max_replicas=1)
    w = world(model_spec("a", 300), model_spec("b", 300), settings=settings)
    serve(w, A)
    serve(w, B)
    w.join(*node_devices("x", 1))
    for _ in range(60):
        w.arrive(A, 3)
        w.arrive(B, 2)
        for device, waiting in ((GB0, 3), (DeviceId("x/host:0"), 0)):
            here = [k for k, i in w.live.items() if i.devices == (device,) and i.state == "ready"]
            w.send(DeviceReport(device, 1000, 100, tuple(InstanceLoad(k, 300, 180, 0, 5, waiting, 9) for k in here)))
        w.pass_time(0.5)
        for key, instance in list(w.live.items()):
            if instance.state == "loading":
                w.activated(key)
    moved = [e for _, e in w.log if isinstance(e, Activate) and e.reason.code is ReasonCode.MIGRATION]
    assert len(moved) == 1
    assert moved[0].devices == (DeviceId("x/host:0"),)
    assert w.routes[moved[0].model] == moved[0].devices


@pytest.mark.parametrize(("kv_bytes", "further"), [(600, 1), (60, 0)])
def test_requests_whose_kv_fills_the_device_get_a_further_instance_before_they_wait_long(
    kv_bytes: int, further: int
) -> None:
    """Time alone would let one instance run them all."""
    w = world(model_spec("a", 300), devices=2)
    serve(w, A)
    (key,) = w.live
    w.send(DeviceReport(GB0, 1000, 500, (InstanceLoad(key, 300, kv_bytes, 0, 5, 1, 9),)))
    assert len(w.live) == 1 + further


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


@pytest.mark.parametrize(("short_s", "leave"), [(0.0, []), (0.1, [B])])
def test_idle_neighbours_leave_as_soon_as_requests_wait_for_memory(short_s: float, leave: list[ModelName]) -> None:
    """And only then: a queue, however long, may wait for a place or for time."""
    w = world(model_spec("a", 300), model_spec("b", 300))
    serve(w, B)
    serve(w, A)
    w.pass_time(30.0)
    a, b = InstanceKey(A, Generation(2)), InstanceKey(B, Generation(1))
    loads = (InstanceLoad(a, 300, 390, 0, 9, 4, 9), InstanceLoad(b, 300, 0, 0, 0, 0, 1, w.now))
    w.send(DeviceReport(GB0, 1000, 10, loads, short_s))
    assert reasons(w, Deactivate) == [(model, ReasonCode.KV_PRESSURE) for model in leave]


def test_a_model_that_has_a_request_several_times_a_second_does_not_leave_between_two() -> None:
    """Idle for 0.3 s: that says nothing, whatever is known of longer pauses."""
    w = world(model_spec("a", 300), model_spec("b", 300))
    serve(w, A)
    for _ in range(3):  # long pauses, so that a pause is believed to be long
        w.pass_time(30.0)
        serve(w, B)
    a, b = InstanceKey(A, Generation(1)), InstanceKey(B, Generation(2))
    loads = (InstanceLoad(a, 300, 390, 0, 9, 4, 9), InstanceLoad(b, 300, 0, 0, 0, 0, 9, 0.3))
    w.send(DeviceReport(GB0, 1000, 10, loads, 1.0))
    assert not reasons(w, Deactivate)
    loads = (loads[0], InstanceLoad(b, 300, 0, 0, 0, 0, 9, 0.6))
    w.send(DeviceReport(GB0, 1000, 10, loads, 1.0))
    assert reasons(w, Deactivate) == [("b", ReasonCode.KV_PRESSURE)]


@pytest.mark.parametrize(("short_s", "requests", "leave"), [(5.0, (2, 1), [B]), (0.1, (2, 1), []), (5.0, (9, 30), [])])
def test_a_model_in_use_gives_way_to_many_requests_that_wait_for_memory(
    short_s: float, requests: tuple[int, int], leave: list[ModelName]
) -> None:
    """Only when that has lasted, and not for as many requests as it has itself. Nobody comes in its place, until it
    starves: it would take the memory again."""
    w = world(model_spec("a", 300), model_spec("b", 300, max_wait_s=80.0))
    serve(w, B)
    serve(w, A)
    w.pass_time(30.0)
    a, b = InstanceKey(A, Generation(2)), InstanceKey(B, Generation(1))
    loads = (InstanceLoad(a, 300, 290, 0, 40, 90, 9), InstanceLoad(b, 300, 100, 0, *requests, 9))
    w.send(DeviceReport(GB0, 1000, 10, loads, short_s))
    assert reasons(w, Deactivate) == [(model, ReasonCode.KV_PRESSURE) for model in leave]
    if not leave:
        return
    assert [e.carry for _, e in w.log if isinstance(e, Deactivate)] == [True], "its requests move on with their tokens"
    before = len(reasons(w, Activate))
    w.gone(b)
    w.arrive(B, 3)
    for _ in range(25):
        w.pass_time(1.0)
    w.send(DeviceReport(GB0, 1000, 300, (InstanceLoad(a, 300, 290, 0, 40, 0, 9),)))
    assert len(reasons(w, Activate)) == before
    for _ in range(20):
        w.pass_time(1.0)
    assert reasons(w, Activate)[before:] == [(B, ReasonCode.DEMAND)]


def test_neighbours_leave_one_after_the_other() -> None:
    """Whether one was enough shows only when it has left."""
    w = world(model_spec("a", 300), model_spec("b", 200), model_spec("c", 200))
    serve(w, B)
    serve(w, ModelName("c"))
    serve(w, A)
    w.pass_time(30.0)
    idle = [InstanceKey(B, Generation(1)), InstanceKey(ModelName("c"), Generation(2))]
    for _ in range(3):
        loads = (
            InstanceLoad(InstanceKey(A, Generation(3)), 300, 390, 0, 9, 4, 9),
            *(InstanceLoad(i, 200, 0, 0, 0, 0, 1, w.now) for i in idle),
        )
        w.send(DeviceReport(GB0, 1000, 10, loads, 0.5))
    assert len(reasons(w, Deactivate)) == 1


def test_an_idle_model_leaves_when_a_request_finds_no_room_beside_its_weights() -> None:
    """Nothing runs and no KV is in use, so the device does not look full: one request (retracted, or too large for what
    the idle neighbour leaves) would stand there for ever."""
    w = world(model_spec("a", 300), model_spec("b", 300), devices=1)
    serve(w, B)
    serve(w, A)
    a, b = InstanceKey(A, Generation(2)), InstanceKey(B, Generation(1))
    w.pass_time(60.0)
    began_s = w.now
    for _ in range(8):
        w.pass_time(1.0)
        loads = (InstanceLoad(a, 300, 0, 0, 1, 0, 9), InstanceLoad(b, 300, 0, 0, 0, 0, 1, w.now))
        here = loads if b in w.live and w.live[b].state == "ready" else loads[:1]
        w.send(DeviceReport(GB0, 1000, 400, here, w.now - began_s if len(here) > 1 else 0.0))
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
    w.live[A, Generation(1)].running.append(w.now)
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
            if instance.state == "loading":
                tries.append((w.now, len(w.live)))
                w.failed(key, ActivationError.NO_MEMORY)
        w.pass_time(0.25)
        for key, instance in list(w.live.items()):
            if instance.state == "draining":
                w.gone(key)
    assert ("a", ReasonCode.MAKE_ROOM) in reasons(w, Deactivate), "what leaves makes the room that was promised"
    assert sum(others > 1 for _, others in tries) <= 6, "not tried in vain beside a for ever"
    assert reasons(w, RefuseWaiting)[-1] == ("b", ReasonCode.ACTIVATION_FAILED)


def test_a_fixed_share_holds_the_least_kv_in_whole_pages() -> None:
    """An account gives whole pages: a share of 50 bytes would be one page of 40, too small for what was promised."""
    w = World(replace(QUIET, elastic_memory=False), [model_spec("a", 700), model_spec("b", 700, min_kv_bytes=50)])
    w.join(*(replace(d, page_bytes=40) for d in node_devices("n", 1)))
    serve(w, A)
    w.pass_time(60.0)
    serve(w, B)
    w.pass_time(0.5)
    shares = {e.model: e.kv_cap_bytes for _, e in w.log if isinstance(e, Activate)}
    assert shares == {A: 150, B: 80}, "half of what is free; the least, where a neighbour had to go"
