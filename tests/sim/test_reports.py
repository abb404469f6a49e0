"""What simulated devices tell the controller."""

from __future__ import annotations

from prism.core.events import ClusterEvent, DeviceReport
from prism.core.settings import PolicySettings
from prism.sim.job import Job
from prism.sim.recorder import RunRecorder
from prism.sim.world import World
from tests.sim.helpers import h100s, tiny_spec


def reports_of(world: World, jobs: list[Job]) -> list[DeviceReport]:
    """Every report that the cluster scheduler is told while ``jobs`` run to their end."""
    told: list[DeviceReport] = []
    listen = world.control.scheduler.on_event

    def on_event(event: ClusterEvent, now_s: float) -> list:
        if isinstance(event, DeviceReport):
            told.append(event)
        return listen(event, now_s)

    world.control.scheduler.on_event = on_event  # type: ignore[method-assign]
    world.join()
    for _ in world.run(iter(jobs)):
        pass
    world.queue.run_until(world.queue.now_s + 5.0)
    return told


def test_an_instance_that_answered_between_two_reports_says_so() -> None:
    spec = tiny_spec("m")
    world = World(h100s(1), [spec], PolicySettings.named("qlm"), RunRecorder(0.0))
    reports = reports_of(world, [Job(i, spec, 1.0 + i * 0.01, 10, 2) for i in range(3)])
    assert all(load.running == 0 for report in reports for load in report.instances), "they are over in between"
    (load,) = reports[-1].instances
    assert load.served == 3


def test_every_rank_says_what_the_instance_served_and_only_the_first_what_runs() -> None:
    spec = tiny_spec("m", tp=2)
    world = World(h100s(2), [spec], PolicySettings(), RunRecorder(0.0))
    reports = reports_of(world, [Job(i, spec, 1.0, 2000, 20_000 if i == 1 else 2) for i in range(2)])
    loads = [load for report in reports for load in report.instances if load.served]
    assert {load.served for load in loads} >= {2}
    lead, other = (report.device for report in reports[:2])
    busy = {report.device for report in reports for load in report.instances if load.running}
    assert busy == {min(lead, other)}
