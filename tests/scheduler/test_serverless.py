"""The autoscaling rival: one model per device, loaded on demand, as many instances as its requests ask for."""

from __future__ import annotations

from dataclasses import replace

from prism.core.effects import Activate, Deactivate
from prism.core.ids import ModelName
from prism.core.reasons import ReasonCode
from prism.core.settings import PolicySettings
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.small_world import GB0, GB1, A, B, on, reasons, serve

SETTINGS = replace(PolicySettings.named("serverlessllm").cluster, concurrency_target=2, max_replicas=3)


def world(*names: str, devices: int) -> World:
    w = World(SETTINGS, [model_spec(name, 10) for name in names])
    w.join(*node_devices("n", devices))
    return w


def holders(w: World, model: ModelName) -> int:
    return sum(key.model == model for key in w.live)


def test_every_model_has_its_device_to_itself() -> None:
    w = world("a", "b", devices=2)
    serve(w, A)
    serve(w, B)
    assert {on(w, A), on(w, B)} == {(GB0,), (GB1,)}
    assert not reasons(w, Deactivate)
    w.check()


def test_the_model_idle_longest_makes_room_and_one_in_use_does_not() -> None:
    w = world("a", "b", "c", devices=2)
    serve(w, A)
    w.pass_time(5.0)
    serve(w, B)
    w.arrive(B)  # in use
    w.report(GB1)
    w.arrive(ModelName("c"))
    assert reasons(w, Deactivate) == [("a", ReasonCode.SWAP)]
    w.check()


def test_a_burst_gets_all_its_instances_in_one_decision() -> None:
    """Five requests at two for each instance: two more at once, and never more than may be."""
    w = world("a", devices=4)
    serve(w, A)
    w.arrive(A, 5)
    w.report(GB0)
    assert reasons(w, Activate)[1:] == [("a", ReasonCode.SCALE_OUT)] * 2
    w.arrive(A, 20)
    w.report(GB0)
    assert holders(w, A) == 3
    w.check()


def test_an_instance_too_many_leaves_before_the_only_one_of_another_model() -> None:
    w = world("a", "b", "c", devices=3)
    serve(w, B)
    w.pass_time(60.0)  # b is idle for much longer
    serve(w, A)
    w.arrive(A, 3)
    w.report(on(w, A)[0])
    w.pass_time(0.5)
    w.step()
    w.pass_time(0.5)
    w.step()
    assert holders(w, A) == 2
    w.arrive(ModelName("c"))
    assert reasons(w, Deactivate) == [("a", ReasonCode.SWAP)]
    w.check()
