"""Two generations of one model on one simulated device."""

from __future__ import annotations

from prism.core.effects import Activate, Deactivate
from prism.core.ids import DeviceId, Generation
from prism.core.instances import InstanceKey, whole_model
from prism.core.reasons import ReasonCode, because
from prism.core.settings import PolicySettings
from prism.sim.job import Job
from prism.sim.recorder import RunRecorder
from prism.sim.world import World
from tests.sim.helpers import h100s, tiny_spec

SPEC = tiny_spec("m")
DEVICE = DeviceId("node0/cuda:0")
PARTS = whole_model([DEVICE])
OLD, NEW = InstanceKey(SPEC.name, Generation(1)), InstanceKey(SPEC.name, Generation(2))
WHY = because(ReasonCode.OPERATOR)


def test_new_requests_go_to_the_newer_one_and_the_older_one_finishes_what_it_has() -> None:
    world = World(h100s(1), [SPEC], PolicySettings(), RunRecorder(0.0))
    device, queue = world.devices[DEVICE], world.queue
    first, second = Job(0, SPEC, 0.0, 100, 2000), Job(1, SPEC, 0.0, 100, 2000)
    world.nodes.activate(Activate(OLD, PARTS, WHY))
    queue.run_until(queue.now_s + 5.0)
    device.arrive(first)
    world.nodes.activate(Activate(NEW, PARTS, WHY))
    queue.run_until(queue.now_s + 1.0)
    device.arrive(second)
    assert set(device.engines) == {OLD, NEW}
    assert (first.instance, second.instance) == (OLD, NEW)
    assert (device.scheduler.counts(OLD).running, device.scheduler.counts(NEW).running) == (1, 1)
    world.nodes.deactivate(Deactivate(OLD, PARTS, carry=False, reason=WHY))
    assert set(device.engines) == {OLD, NEW}, "its request runs"
    queue.run_until(queue.now_s + 60.0)
    assert set(device.engines) == set(device.shards) == {NEW}
    assert [r.error for r in world.recorder.records] == ["", ""]


def test_a_drain_that_takes_too_long_carries_over_to_the_newer_one() -> None:
    world = World(h100s(1), [SPEC], PolicySettings(), RunRecorder(0.0))
    device, queue = world.devices[DEVICE], world.queue
    endless = Job(0, SPEC, 0.0, 100, 1_000_000)
    world.nodes.activate(Activate(OLD, PARTS, WHY))
    queue.run_until(5.0)
    device.arrive(endless)
    world.nodes.activate(Activate(NEW, PARTS, WHY))
    queue.run_until(6.0)
    world.nodes.deactivate(Deactivate(OLD, PARTS, carry=False, reason=WHY))
    queue.run_until(35.9)
    assert endless.instance == OLD
    queue.run_until(36.5)
    assert endless.instance == NEW and endless.generated > 0 and set(device.engines) == {NEW}


def test_an_instance_that_is_told_to_leave_while_it_loads_leaves_when_it_is_loaded() -> None:
    world = World(h100s(1), [SPEC], PolicySettings(), RunRecorder(0.0))
    device, queue = world.devices[DEVICE], world.queue
    world.nodes.activate(Activate(OLD, PARTS, WHY))
    world.nodes.deactivate(Deactivate(OLD, PARTS, carry=False, reason=WHY))
    assert set(device.shards) == {OLD}
    queue.run_until(5.0)
    assert not device.shards and not world.nodes.instances
