"""An instance on its way to serving: memory, a parked engine, weights over the links, ready.

::

    command, take memory --+--> parked engine, relayout -----------------------------------+--> ready --> serves
                           +--> (remote memory or SSD) --> PCIe [--> NVLink] --> weights --+

An instance that is to serve over others of its model meanwhile (:mod:`prism.sim.pairs`, :mod:`prism.sim.pipelines`)
loads its first pieces before everything else, and says when they are there.

The engine takes the model's layout while the weights are loaded; both must be done. Where devices are played by the
host's cores that is work for these cores (constructing the model's objects), so that it slows down the engines beside
it and several activations slow down each other. Weights that are not in the node's memory come in :data:`BLOCKS`
blocks, each of which goes on to the device while the next one arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from prism.core.effects import Activate
from prism.core.ids import DeviceId, NodeId
from prism.core.specs import ModelSpec
from prism.sim.cluster_sections import TimingSection
from prism.sim.fetch import Fetch
from prism.sim.gpus import GpuKind
from prism.sim.links import Flow, Link, evenly
from prism.sim.queue import EventQueue
from prism.sim.roofline import Load
from prism.sim.sharing import Pool
from prism.sim.stint import Stint
from prism.sim.weight_roads import WeightRoads

BLOCKS: Final = 16

Mark = tuple[float, Callable[["Activation"], None]]
"""A part of the weights, and what is called when it is there."""


class Activation:
    """Runs the phases of one ``Activate`` whose memory is taken, for engines that are there in ``engine_in_s`` and keep
    what they built for the model where it ``wakes``; calls ``on_ready(self)`` at the end, once. ``gpu`` and ``pool``
    are those of rank 0. ``marks``: parts of the weights, each more than the one before, and what is called when an
    engine has so much but not the rest. ``group``: see :meth:`WeightRoads.source_path`."""

    def __init__(
        self,
        queue: EventQueue,
        roads: WeightRoads,
        timing: TimingSection,
        effect: Activate,
        spec: ModelSpec,
        gpu: GpuKind,
        pool: Pool,
        engine_in_s: float,
        wakes: bool,
        on_ready: Callable[[Activation], None],
        marks: Sequence[Mark] = (),
        group: int = 0,
    ) -> None:
        self.effect, self.spec = effect, spec
        self._marks, self._group = marks, group
        bounds = [0.0, *(share for share, _ in marks), 1.0]
        self._parts = tuple(after - before for before, after in pairwise(bounds))
        """Of the weights, in the order in which they come."""
        self._part = 0
        self._told = 0
        """Of the marks."""
        self._device_part, self._device_bytes = 1.0, 1.0
        """Of the part that is on its way: how much of it the flows to the devices carry, and in bytes of each."""
        self.started_s = queue.now_s
        self.loaded_s: float | None = None
        self._queue, self._roads, self._timing, self._gpu = queue, roads, timing, gpu
        self._on_ready, self._wakes = on_ready, wakes
        self._flows: dict[DeviceId, Flow] = {}
        self._fetches: dict[NodeId, Fetch] = {}
        self._engine_ready = self._weights_here = False
        self._stint = Stint(queue, (pool,), self._engine_taken)
        self._alarm = queue.alarm(self._take_layout)
        self._alarm.set(queue.now_s + engine_in_s)
        self._load()

    def cancel(self) -> None:
        """Stop where it is."""
        self._alarm.clear()
        self._stint.rest()
        for flow in self._flows.values():
            self._roads.network.cancel(flow)
        for node, fetch in self._fetches.items():
            self._roads.fetcher(node).cancel(fetch)
            self._roads.gave_up(node, self.spec.name, self._group)
        self._flows.clear()
        self._fetches.clear()

    @property
    def held_share(self) -> float:
        """Part of the weights that is on every device."""
        if self._weights_here:
            return 1.0
        network = self._roads.network
        if self._fetches:
            left = max(fetch.left_share(network) for fetch in self._fetches.values())
        else:
            sent = max((network.left_bytes(flow) for flow in self._flows.values()), default=0.0)
            left = self._device_part * sent / self._device_bytes
        return sum(self._parts[: self._part]) + self._parts[self._part] * (1.0 - left)

    @property
    def over(self) -> bool:
        """Nothing is on its way any more."""
        return self._weights_here

    # --- the engine ---

    def _take_layout(self, _: object) -> None:
        wake = self._timing.wake
        seconds = float(wake if wake is not None and self._wakes else self._timing.relayout)
        if self._gpu.overhead_is_compute:
            self._stint.begin(seconds, Load(self._gpu.engine_share, 0.0))
        else:
            self._alarm.fn = self._engine_taken
            self._alarm.set(self._queue.now_s + seconds)

    def _engine_taken(self, _: object) -> None:
        self._engine_ready = True
        self._stint.rest()
        self._maybe_ready()

    # --- the weights ---

    def _load(self) -> None:
        """Bring the weights to the node(s), then to the devices."""
        nodes = {self._roads.topology.devices[device].node: None for device in self.effect.devices}
        if not self._marks and not self._part:  # beside one that serves early it waits for what that one waits for
            known = (self._roads.arriving_parts(node, self.spec.name, self._group) for node in nodes)
            self._parts = next((parts for parts in known if parts), self._parts)
        for node in nodes:
            self._fetch(node)
        if not self._fetches:
            self._load_devices(1.0)

    def _fetch(self, node: NodeId) -> None:
        """Bring the weights into the memory of ``node``, if they are not there."""
        path = self._roads.source_path(node, self.spec.name, self._parts, self._part, self._group)
        if path:
            fetcher = self._roads.fetcher(node)
            nbytes = self.spec.weight_bytes * self._parts[self._part]
            # The machine's memory has it once: instances that load beside each other wait for the same bytes.
            what = self.spec.name, self._part, self._parts, self._group
            self._fetches[node] = fetcher.fetch(path, nbytes, partial(self._fetched, node), what)

    def _fetched(self, node: NodeId) -> None:
        """The last block came; those before it are on the devices already."""
        del self._fetches[node]
        self._roads.arrived(node, self.spec, self._parts, self._part, self._group)
        if not self._fetches:
            self._load_devices(1.0 / BLOCKS)

    def _load_devices(self, part: float) -> None:
        """Start one flow per shard, split over its helpers, for ``part`` of what is on its way."""
        load = self._roads.load
        nbytes = self.spec.shard_weight_bytes * self._parts[self._part] * part
        nbytes /= load.naive_share if load.mode == "naive" else 1.0
        self._device_part, self._device_bytes = part, max(1.0, nbytes)
        for device in self.effect.devices:
            self._load_device(device, nbytes)

    def _load_device(self, device: DeviceId, nbytes: float) -> None:
        roads, topology = self._roads, self._roads.topology
        node = topology.devices[device].node
        helpers = topology.helpers(device) if roads.load.mode == "parallel" else [device]
        shares = evenly([topology.load_path(node, helper, device) for helper in helpers])
        self._flows[device] = roads.network.start(shares, max(1.0, nbytes), partial(self._loaded, device))

    def links_lost(self, links: set[Link]) -> None:
        """``links`` are gone with their device or node (none of this instance's own): what was on its way to a device
        goes on through the helpers that are left; what came from another node comes again, from elsewhere."""
        for device, flow in list(self._flows.items()):
            if not links.isdisjoint(flow.path):
                self._load_device(device, self._roads.network.cancel(flow))
        lost = [node for node, fetch in self._fetches.items() if not links.isdisjoint(fetch.path)]
        for node in lost:
            self._roads.fetcher(node).cancel(self._fetches.pop(node))
            self._roads.gave_up(node, self.spec.name, self._group)
        for node in lost:
            self._fetch(node)
        if lost and not self._fetches:
            self._load_devices(1.0)

    def _loaded(self, device: DeviceId) -> None:
        del self._flows[device]
        if self._flows:
            return
        if self._part < len(self._parts) - 1:
            self._part += 1
            self._load()
        else:
            self._weights_here = True
            self.loaded_s = self._queue.now_s
        self._maybe_ready()

    def _maybe_ready(self) -> None:
        if self._told:
            self._tell_marks()
            if self._weights_here:
                self._on_ready(self)
        elif self._engine_ready and (self._weights_here or (self._part and self._marks)):
            self._alarm.fn = self._ready if self._weights_here else self._first_ready
            self._alarm.set(self._queue.now_s + self._timing.ready)

    def _ready(self, _: object) -> None:
        self._on_ready(self)

    def _first_ready(self, _: object) -> None:
        self._tell_marks()

    def _tell_marks(self) -> None:
        while self._told < self._part:
            self._told += 1
            self._marks[self._told - 1][1](self)
