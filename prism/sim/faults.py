"""Things that happen to the fleet in mid-run: failures, stragglers, devices that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prism.config.units import format_duration
from prism.core.errors import InvalidValue
from prism.core.events import DeviceLost, NodeJoined, NodeLost, OperatorDrain
from prism.core.ids import DeviceId, NodeId
from prism.sim.cluster_file import FaultSection
from prism.sim.device import Device
from prism.sim.job import Job
from prism.sim.links import Link

if TYPE_CHECKING:
    from prism.sim.world import World


class Faults:
    """Carries out the ``faults`` section. To add a kind: a method here and its line in :attr:`_kinds`, its name in
    :class:`prism.sim.cluster_file.FaultSection`, and what its target must be in :mod:`prism.sim.fault_check`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.happened: list[str] = []
        """What was done, in words, for the report."""
        kinds: dict[str, Callable[[FaultSection], None]] = {
            "gpu_fails": self._gpu_fails,
            "node_fails": self._node_fails,
            "gpu_added": self._gpu_added,
            "node_added": self._node_added,
            "gpu_drained": self._gpu_drained,
            "straggler": self._straggler,
            "engine_dies": self._engine_dies,
        }
        self._kinds = kinds

    def plan(self, faults: tuple[FaultSection, ...], start_s: float) -> None:
        """Let each fault happen at its time after ``start_s``, when the trace begins. Raises :class:`InvalidValue` for
        the engine of a model that is not simulated."""
        for index, fault in enumerate(faults):
            model = fault.target.partition(" ")[2]
            if fault.kind == "engine_dies" and model not in self._world.specs:
                raise InvalidValue(f"faults[{index}].target", model, "no such model", sorted(self._world.specs)[:20])
            self._world.queue.after(start_s + float(fault.at) - self._world.queue.now_s, self._happen, fault)

    def _happen(self, fault: FaultSection) -> None:
        self._kinds[fault.kind](fault)
        speed = "" if fault.speed is None else f" (speed {fault.speed:g})"
        self.happened.append(f"{format_duration(fault.at)}: {fault.kind} {fault.target}".rstrip() + speed)

    def _gpu_fails(self, fault: FaultSection) -> None:
        device = self._device(fault.target)
        self._lose([device], lambda: self._world.control.tell(DeviceLost(device.id)), set())

    def _node_fails(self, fault: FaultSection) -> None:
        node = NodeId(fault.target)
        devices = [device for device in self._world.devices.values() if device.spec.node == node and not device.gone]
        self._world.host_cache.remove_node(node)
        nic = self._world.topology.nodes[node].nic_up
        self._lose(devices, lambda: self._world.control.tell(NodeLost(node)), {nic})

    def _lose(self, devices: list[Device], tell: Callable[[], None], links: set[Link]) -> None:
        """The devices and ``links`` are gone now: transfers over them start again elsewhere; requests and controller
        notice when the lease has run out."""
        world = self._world
        jobs: list[Job] = []
        gone = {device.id for device in devices}
        for device in devices:
            jobs += device.fail()
        for record in list(world.nodes.instances.values()):
            if gone & set(record.devices):
                world.nodes.lose(record.key, tell=False)
        for device in devices:
            links |= world.topology.remove_device(device.id)
        for record in world.nodes.instances.values():
            if record.activation is not None:
                record.activation.links_lost(links)

        def noticed(_: object) -> None:
            tell()
            for job in jobs:
                job.lost_times += 1
                world.front.send_back(job)

        world.queue.after(world.cluster.timing.lease, noticed)

    def _gpu_added(self, fault: FaultSection) -> None:
        """One more GPU like the node's others; ``target`` is the node."""
        world, node = self._world, NodeId(fault.target)
        self._world.control.tell(NodeJoined(node, (world.machines.add_device(node).spec,)))

    def _node_added(self, fault: FaultSection) -> None:
        """One more node like those of the first group, or of the first one whose GPU is ``target``."""
        kinds = [group.gpu for group in self._world.cluster.groups]
        devices = self._world.machines.add_node(kinds.index(fault.target) if fault.target else 0)
        self._world.control.tell(NodeJoined(devices[0].spec.node, tuple(device.spec for device in devices)))

    def _gpu_drained(self, fault: FaultSection) -> None:
        self._world.control.tell(OperatorDrain((self._device(fault.target).id,)))

    def _straggler(self, fault: FaultSection) -> None:
        assert fault.speed is not None  # checked with the file
        self._device(fault.target).pool.set_speed(fault.speed)

    def _engine_dies(self, fault: FaultSection) -> None:
        name, _, model = fault.target.partition(" ")
        device = self._device(name)
        for engine in list(device.engines.values()):
            if engine.model == model:
                self._world.nodes.lose(engine.key, tell=True)

    def _device(self, name: str) -> Device:
        """:mod:`prism.sim.fault_check` has seen that it is there."""
        return self._world.devices[DeviceId(name)]
