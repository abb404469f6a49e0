"""The simulated fleet: everything of one run, built from a cluster file, models and policy settings.

The production schedulers (:mod:`prism.scheduler`) make every decision; this world tells them what happens and carries
out what they want, on modelled engines, memory and links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prism.core.effects import Activate, ClusterEffect, Deactivate, GpuEffect, Hold, RefuseWaiting, Route, ShareWaiting
from prism.core.events import ClusterEvent, DeviceReport, NodeJoined, PinChanged
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.pace import DevicePace
from prism.core.settings import PolicySettings
from prism.core.specs import DeviceSpec, ModelSpec
from prism.scheduler import cluster_scheduler
from prism.sim.calibration import Calibration
from prism.sim.cluster_sections import Cluster
from prism.sim.control import Control
from prism.sim.device import SimDevice
from prism.sim.engine import Engine
from prism.sim.engines import EngineMaker
from prism.sim.faults import Faults
from prism.sim.front import SimFront
from prism.sim.gpus import GpuKind
from prism.sim.host_cache import HostCache
from prism.sim.intake import EngineLimits
from prism.sim.job import Job
from prism.sim.links import Network
from prism.sim.machines import Machines
from prism.sim.nodes import Nodes
from prism.sim.parking import Parking
from prism.sim.queue import EventQueue
from prism.sim.recorder import RunRecorder
from prism.sim.sharing import Pool
from prism.sim.topology import Topology
from prism.sim.weight_roads import WeightRoads

STALLED_S: Final = 1800.0
"""A run ends when no request has ended for so long after the last arrival."""


class World:
    """One run. Makes the parts, gives each what it needs, and carries word between them (it is the
    :class:`prism.sim.device.DeviceSink` of all devices)."""

    def __init__(
        self,
        cluster: Cluster,
        models: Iterable[ModelSpec],
        settings: PolicySettings,
        recorder: RunRecorder,
        *,
        block_tokens: int | None = None,
        fast: bool = True,
        calibration: Calibration | None = None,
    ) -> None:
        self.cluster, self.settings, self.recorder = cluster, settings, recorder
        self.specs: dict[ModelName, ModelSpec] = {spec.name: spec for spec in models}
        self.block_tokens = block_tokens or cluster.engine.prefix_block_tokens
        self.queue = queue = EventQueue()
        network, self.topology, self.host_cache = Network(queue), Topology(), HostCache()
        timing, load, engine = cluster.timing, cluster.load, cluster.engine
        pooled, stays = settings.cluster.engine_pool, settings.cluster.policy.has_fixed_map
        parked = load.parked_per_device if pooled and not stays else 0
        self.machines = Machines(
            cluster, calibration, network, self.topology, self.host_cache, self._make_device, parked
        )
        self.roads = WeightRoads(network, self.topology, self.host_cache, self.machines.fetcher, load)
        parking = Parking(queue, timing, load.parked_per_device, load.kept_models, pooled=pooled)
        limits = EngineLimits(engine.chunk_tokens, engine.max_running, fast)
        engines = EngineMaker(queue, limits, self.block_tokens, calibration, weights_stay=stays)
        self.nodes = Nodes(queue, timing, self.specs, self.devices, engines, parking, self.roads, recorder, self._tell)
        slowdown = self.machines.front_slowdown
        self.front = SimFront(queue, timing, self.devices, slowdown, self._tell, recorder.ended)
        self.control = Control(
            queue,
            cluster_scheduler(settings.cluster, self.specs.values()),
            self._carry_out,
            lambda orders: self.front.beginnings.ordered(orders, queue.now_s),
        )
        self.faults = Faults(queue, self.machines, self.nodes, self._tell, self.front.wait, float(timing.lease))
        self._build()

    @property
    def devices(self) -> dict[DeviceId, SimDevice]:
        """All that ever were there."""
        return self.machines.devices

    def _make_device(self, spec: DeviceSpec, gpu: GpuKind, pool: Pool, pace: DevicePace | None) -> SimDevice:
        return SimDevice(spec, gpu, pool, self.settings.gpu, self.queue, self, self.cluster.timing, pace)

    # --- between the parts ---

    def _tell(self, event: ClusterEvent) -> None:
        self.control.tell(event)

    def _carry_out(self, effect: ClusterEffect) -> None:
        """Commands reach the node agents after the command time, routes the front doors at once."""
        self.recorder.decided(effect, self.queue.now_s)
        match effect:
            case Activate():
                self.queue.after(self.cluster.timing.command, self.nodes.activate, effect)
            case Deactivate():
                self.queue.after(self.cluster.timing.command, self.nodes.deactivate, effect)
            case Route(model, devices):
                self.front.route(model, devices)
            case RefuseWaiting():
                self.front.refuse(effect)
            case ShareWaiting():
                self.queue.after(self.cluster.timing.command, self.nodes.share_waiting, effect)

    def decided(self, effect: GpuEffect | Hold) -> None:
        """A device's scheduler decided ``effect``."""
        self.recorder.decided(effect, self.queue.now_s)

    def ended(self, job: Job) -> None:
        """A device is done with ``job``."""
        self.front.ended(job)

    def sent_back(self, job: Job) -> None:
        """A device cannot take ``job``."""
        self.front.wait(job)

    def emptied(self, engine: Engine) -> None:
        """A draining engine runs nothing any more."""
        self.nodes.emptied(engine)

    def reported(self, report: DeviceReport) -> None:
        """A device's report reaches the controller."""
        self.control.tell(report)

    # --- running ---

    def run(self, jobs: Iterator[Job], progress_every_s: float = 0.0) -> Iterator[float]:
        """Let ``jobs`` (in order of arrival) arrive and run until all have ended. Yields the simulated time every
        ``progress_every_s`` seconds of it (never, when 0)."""
        queue, front_s = self.queue, float(self.cluster.timing.front)
        next_yield_s = queue.now_s + (progress_every_s or float("inf"))
        sampling = self.recorder.sample_every_s
        next_sample_s = queue.now_s if sampling else float("inf")
        for job in jobs:
            at_s = job.arrival_s + front_s
            while min(next_yield_s, next_sample_s) <= at_s:
                if next_sample_s <= next_yield_s:
                    queue.run_until(next_sample_s)
                    self._sample()
                    next_sample_s += sampling
                else:
                    queue.run_until(next_yield_s)
                    yield next_yield_s
                    next_yield_s += progress_every_s
            queue.run_until(at_s)
            self.front.arrive(job)
        yield from self._finish(next_sample_s, sampling)

    def _finish(self, next_sample_s: float, sampling: float) -> Iterator[float]:
        """Run until every request has ended, or none does for :data:`STALLED_S`."""
        queue, records = self.queue, self.recorder.records
        ended, ended_s = len(records), queue.now_s
        while self.front.open and queue.now_s - ended_s < STALLED_S:
            pending_s = queue.next_s()
            if pending_s is None:
                return
            until_s = min(next_sample_s, max(pending_s, queue.now_s + 1.0))
            queue.run_until(until_s)
            if len(records) > ended:
                ended, ended_s = len(records), queue.now_s
            if until_s == next_sample_s:
                self._sample()
                next_sample_s += sampling
                yield until_s

    def stuck(self) -> list[Job]:
        """Requests that nothing will ever finish (there must be none)."""
        return [job for device in self.devices.values() for job in device.requests]

    def _sample(self) -> None:
        self.recorder.sample(self.queue.now_s, self.front.waiting(), self.devices.values())

    # --- building ---

    def _build(self) -> None:
        for index, group in enumerate(self.cluster.groups):
            for _ in range(group.nodes):
                self.machines.add_node(index)
        if self.cluster.load.source == "every_node":
            self.host_cache.fill_everywhere()
        else:
            self.host_cache.spread((spec.name, spec.weight_bytes) for spec in self.specs.values())
        self.faults.plan(self.cluster.faults, self.specs, self.recorder.offset_s)

    def join(self) -> None:
        """The nodes report to the controller, pinned models are asked for."""
        by_node: dict[NodeId, list[DeviceSpec]] = {}
        for device in self.devices.values():
            by_node.setdefault(device.spec.node, []).append(device.spec)
        for node, specs in by_node.items():
            self.control.tell(NodeJoined(node, tuple(specs)))
        for spec in self.specs.values():
            if spec.pinned:
                self.control.tell(PinChanged(spec.name, True))
