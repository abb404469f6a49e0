"""Devices that are to be empty: what is in use on them finds another place, whatever happens to that place."""

from __future__ import annotations

import pytest

from prism.core.effects import Activate, Deactivate
from prism.core.events import (
    ActivationError,
    InstanceFound,
    OperatorDrain,
    OperatorLoad,
    OperatorUnload,
)
from prism.core.ids import DeviceId, Generation, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode
from prism.core.settings import ClusterSettings
from tests.scheduler.cluster_world import Live, World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import GB0, GB1, QUIET, A, B, C, on, reasons, serve, world


@pytest.mark.parametrize("room", [True, False])
def test_draining_a_device_moves_what_is_in_use_and_what_is_idle_if_there_is_room(room: bool) -> None:
    w = world(model_spec("a", 300), model_spec("b", 300), model_spec("c", 500), devices=2, settings=QUIET)
    serve(w, A)
    w.send(OperatorLoad(B, (GB0,)))
    if not room:
        w.send(OperatorLoad(C, (GB1,)))
    w.pass_time(0.5)
    w.step()
    w.arrive(A)
    w.report(GB0)
    w.drained.add(GB0)
    w.send(OperatorDrain((GB0,)))
    moved = [("a", ReasonCode.DRAIN), ("b", ReasonCode.DRAIN)]
    assert reasons(w, Activate)[-1 - room :] == moved[: 1 + room], "what is in use finds its place first"
    assert reasons(w, Deactivate) == ([] if room else moved[1:])
    w.pass_time(0.5)
    w.activated((A, Generation(3 if room else 4)))
    assert w.routes[A] == (GB1,)
    assert ("a", ReasonCode.MIGRATED) in reasons(w, Deactivate)
    if room:
        w.activated((B, Generation(4)))
        assert w.routes[B] == (GB1,)
        assert ("b", ReasonCode.MIGRATED) in reasons(w, Deactivate)
    assert not [e for _, e in w.log if isinstance(e, Deactivate) and e.carry], "running requests finish where they are"


X0 = DeviceId("x/host:0")
X = NodeId("x")


def two_machines(settings: ClusterSettings = QUIET) -> World:
    """a is in use on the first of two devices of n, which is also where the least pressure is; x is empty."""
    w = world(model_spec("a", 300), devices=2, settings=settings)
    serve(w, A)
    w.arrive(A)
    w.report(GB0)
    assert on(w, A) == (GB0,)
    w.join(*node_devices("x", 1))
    return w


def drain(w: World, *devices: DeviceId, carry: bool = False) -> None:
    w.drained.update(devices)
    w.send(OperatorDrain(devices, carry=carry))


def coming(w: World) -> dict[InstanceKey, tuple[DeviceId, ...]]:
    return {key: i.devices for key, i in w.live.items() if i.state == "loading"}


def test_what_leaves_one_device_does_not_go_to_another_that_is_to_be_empty_too() -> None:
    w = two_machines()
    drain(w, GB0, GB1)
    assert coming(w) == {(A, Generation(2)): (X0,)}


def test_a_new_place_that_is_drained_before_it_serves_is_replaced_at_once() -> None:
    w = two_machines()
    drain(w, GB0)
    assert coming(w) == {(A, Generation(2)): (GB1,)}
    drain(w, GB1)
    assert coming(w) == {(A, Generation(3)): (X0,)}
    w.activated((A, Generation(3)))
    assert w.routes[A] == (X0,)
    w.step()
    assert [i.devices for i in w.live.values()] == [(X0,)]
    w.check()


@pytest.mark.parametrize("error", [ActivationError.ENGINE_DIED, ActivationError.NO_MEMORY, ActivationError.STALE])
def test_a_new_place_that_fails_is_replaced_by_another(error: ActivationError) -> None:
    w = two_machines()
    drain(w, GB0)
    w.failed((A, Generation(2)), error)
    w.pass_time(5.0)
    w.report(GB0)
    assert len(coming(w)) == 1
    w.activated((A, Generation(3)))
    assert w.routes[A] != (GB0,)
    w.check()


def test_a_new_place_that_is_lost_is_replaced_by_another() -> None:
    w = two_machines()
    drain(w, GB0, GB1)
    w.lose(X)
    w.join(*node_devices("x", 1))
    w.report(GB0)
    assert coming(w) == {(A, Generation(3)): (X0,)}
    w.check()


def test_a_model_that_fails_everywhere_else_leaves_all_the_same() -> None:
    w = two_machines()
    drain(w, GB0)
    while w.live[(A, Generation(1))].state == "ready":
        for key in coming(w):
            w.failed(key, ActivationError.ENGINE_DIED)
        w.pass_time(1.0)
        w.report(GB0)
        assert w.now < 100.0
    assert len([e for _, e in w.log if isinstance(e, Activate)]) == 1 + QUIET.activation_attempts


def test_what_is_found_on_a_device_that_is_to_be_empty_moves_too() -> None:
    """Its activation ended well although the controller that ordered it is gone."""
    w = world(model_spec("a", 300), devices=2)
    drain(w, GB1)
    found = InstanceKey(A, Generation(7))
    w.ever.add(found)
    w.live[found] = Live((GB1,), 300, "ready", w.now)
    w.send(InstanceFound(found, whole_model([GB1])))
    w.arrive(A)
    w.report(GB1)
    assert coming(w) == {(A, Generation(8)): (GB0,)}
    w.check()


def test_requests_are_carried_over_once_the_new_place_serves() -> None:
    w = two_machines()
    drain(w, GB0, carry=True)
    w.activated((A, Generation(2)))
    w.report(GB0)
    assert [(e.key.generation, e.carry) for _, e in w.log if isinstance(e, Deactivate)][-1] == (Generation(1), True)
    w.report(GB0)
    assert len([e for _, e in w.log if isinstance(e, Deactivate) and e.carry]) == 1, "said once"


def test_what_leaves_a_device_anyhow_is_not_wanted_elsewhere() -> None:
    w = two_machines()
    w.step()
    w.send(OperatorUnload(A))
    drain(w, GB0, GB1)
    w.step()
    w.pass_time(5.0)
    assert not w.live
