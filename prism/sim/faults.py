"""Things that happen to the fleet in mid-run: failures, stragglers, devices that come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prism.config.units import format_duration
from prism.core.errors import InvalidValue
from prism.core.events import ClusterEvent, DeviceLost, NodeJoined, NodeLost, OperatorDrain
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import FaultSection
from prism.sim.device import SimDevice
from prism.sim.job import Job
from prism.sim.links import Link
from prism.sim.machines import Machines
from prism.sim.nodes import Nodes
from prism.sim.queue import EventQueue


class Faults:
    """Carries out the ``faults`` section. To add a kind: a method here and its line in :attr:`_kinds`, its name in
    :class:`prism.sim.cluster_sections.FaultSection`, and what its target must be in :mod:`prism.sim.fault_check`.

    ``tell`` takes what the controller notices, ``wait`` the requests of what is lost, both ``lease_s`` after it."""

    def __init__(
        self,
        queue: EventQueue,
        machines: Machines,
        nodes: Nodes,
        tell: Callable[[ClusterEvent], None],
        wait: Callable[[Job], None],
        lease_s: float,
    ) -> None:
        self._queue, self._machines, self._nodes = queue, machines, nodes
        self._tell, self._wait, self._lease_s = tell, wait, lease_s
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

    def plan(self, faults: tuple[FaultSection, ...], models: Mapping[ModelName, ModelSpec], start_s: float) -> None:
        """Let each fault happen at its time after ``start_s``, when the trace begins. Raises :class:`InvalidValue` for
        the engine of a model that is not among ``models``."""
        for index, fault in enumerate(faults):
            model = fault.target.partition(" ")[2]
            if fault.kind == "engine_dies" and model not in models:
                raise InvalidValue(f"faults[{index}].target", model, "no such model", sorted(models)[:20])
            self._queue.after(start_s + float(fault.at) - self._queue.now_s, self._happen, fault)

    def _happen(self, fault: FaultSection) -> None:
        self._kinds[fault.kind](fault)
        speed = "" if fault.speed is None else f" (speed {fault.speed:g})"
        self.happened.append(f"{format_duration(fault.at)}: {fault.kind} {fault.target}".rstrip() + speed)

    def _gpu_fails(self, fault: FaultSection) -> None:
        device = self._device(fault.target)
        self._lose([device], DeviceLost(device.id), set())

    def _node_fails(self, fault: FaultSection) -> None:
        node = NodeId(fault.target)
        devices = [device for device in self._machines.devices.values() if device.spec.node == node and not device.gone]
        self._lose(devices, NodeLost(node), {self._machines.remove_node_memory(node)})

    def _lose(self, devices: list[SimDevice], event: ClusterEvent, links: set[Link]) -> None:
        """The devices and ``links`` are gone now: transfers over them start again elsewhere; requests and controller
        notice when the lease has run out."""
        jobs = [job for device in devices for job in device.fail()]
        gone = [device.id for device in devices]
        self._nodes.lose_devices(gone)
        self._nodes.lose_links(links | self._machines.remove_links(gone))

        def notice(_: object) -> None:
            self._tell(event)
            for job in jobs:
                self._wait(job)

        self._queue.after(self._lease_s, notice)

    def _gpu_added(self, fault: FaultSection) -> None:
        """One more GPU like the node's others; ``target`` is the node."""
        node = NodeId(fault.target)
        self._tell(NodeJoined(node, (self._machines.add_device(node).spec,)))

    def _node_added(self, fault: FaultSection) -> None:
        """One more node like those of the first group, or of the first one whose GPU is ``target``."""
        devices = self._machines.add_node(self._machines.gpus().index(fault.target) if fault.target else 0)
        self._tell(NodeJoined(devices[0].spec.node, tuple(device.spec for device in devices)))

    def _gpu_drained(self, fault: FaultSection) -> None:
        self._tell(OperatorDrain((self._device(fault.target).id,)))

    def _straggler(self, fault: FaultSection) -> None:
        assert fault.speed is not None  # checked with the file
        self._device(fault.target).pool.set_speed(fault.speed)

    def _engine_dies(self, fault: FaultSection) -> None:
        name, _, model = fault.target.partition(" ")
        for key in list(self._device(name).engines):
            if key.model == model:
                self._nodes.lose_instance(key)

    def _device(self, name: str) -> SimDevice:
        """:mod:`prism.sim.fault_check` has seen that it is there."""
        return self._machines.devices[DeviceId(name)]
