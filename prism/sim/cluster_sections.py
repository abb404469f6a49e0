"""What stands in ``cluster.yaml`` (:mod:`prism.sim.cluster_file` reads it): the machines, their links and how fast the
software around the engines is. Every key has a default and a description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from prism.config.sections.base import Section
from prism.config.sections.machine import PaceConfig
from prism.config.units import Bytes, Seconds
from prism.policy.live.choice import STAGE_WAIT


def _seconds(value: float) -> Any:
    return field(default_factory=lambda: Seconds(value))


Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0.0)]


class NodeGroup(Section, frozen=True, kw_only=True):
    """Equal machines."""

    gpu: str = "H100"
    """Name in :data:`prism.sim.gpus.GPUS`."""
    nodes: Count = 1
    gpus_per_node: Count = 8
    rates: dict[str, Annotated[float, Meta(ge=0.0)]] = field(default_factory=dict)
    """In place of what the table of GPUs has (the float fields of :class:`prism.sim.gpus.GpuKind`)."""
    memory: Bytes | None = None
    """What models may use of each GPU; default: 90% of it. Of it each engine's process takes its part."""
    domain_gpus: Count | None = None
    """GPUs of one node that NVLink joins; default: all of the node."""
    host_memory: Bytes = field(default_factory=lambda: Bytes(1700 * 10**9))
    """For copies of weights."""
    dram_gbytes_per_s: Positive = 300.0
    shared_compute: bool = False
    """All devices of a node share one compute pool (virtual devices on one CPU)."""
    background_load: Annotated[float, Meta(ge=0.0)] = 0.0
    """Compute that the rest of the system takes all the time, as a share of the node's pool."""
    cores: Count | None = None
    """Of a node whose devices share its compute; only ``crowding`` asks."""
    crowding: Annotated[float, Meta(ge=0.0)] = 0.0
    """How many times of what it takes alone a step takes more for each engine beyond ``cores``, besides its share."""
    pace: PaceConfig | None = None
    """What is declared of these devices' speed: device schedulers begin with it, as live ones do. What steps take in
    the simulation, a calibrated table says."""


class NetworkSection(Section, frozen=True, kw_only=True):
    """Between machines: leaf switches under a spine."""

    nic_gbit: Positive = 100.0
    """Per node and direction."""
    efficiency: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    nodes_per_leaf: Count = 16
    oversubscription: Positive = 1.0
    """Bandwidth of a leaf's nodes over that of its uplinks."""
    ssd_gbytes_per_s: Positive = 6.0


class EngineSection(Section, frozen=True, kw_only=True):
    """Settings of every engine."""

    chunk_tokens: Count = 8192
    max_running: Count = 256
    prefix_block_tokens: Count = 512
    """Used when the trace does not say how long its blocks are."""


class TimingSection(Section, frozen=True, kw_only=True):
    """How long the software around the engines takes."""

    front: Seconds = _seconds(0.003)
    """From the client's bytes to the request standing in a device's queue."""
    deliver: Seconds = _seconds(0.002)
    """From an engine's token to the client."""
    command: Seconds = _seconds(0.002)
    """From the controller's decision to the node agent and back."""
    route: Seconds = _seconds(0.002)
    """Moving an inactive model's waiting requests to a device's queue."""
    report_every: Seconds = _seconds(1.0)
    """Least time between two reports of a device to the controller."""
    relayout: Seconds = _seconds(0.6)
    """A parked engine takes a model's layout (address space, KV pool, model classes), beside the loading."""
    wake: Seconds | None = None
    """The same where the engine keeps what it built for the model; default: no less."""
    ready: Seconds = _seconds(0.1)
    """From the last weight byte, and the layout, to the first request."""
    unload: Seconds = _seconds(0.02)
    """An engine gives a model up and parks."""
    engine_start: Seconds = _seconds(20.0)
    """A new engine process up to the parked state, when there is no parked one or the pool is off."""
    park: Seconds = _seconds(1.5)
    """A parked engine is replaced in the background."""
    lease: Seconds = _seconds(3.0)
    """Until a lost node or device is noticed."""
    resume: Seconds = _seconds(0.01)
    """Asking the front door for the tokens of a lost request."""


class LoadSection(Section, frozen=True, kw_only=True):
    """How weights come to a device."""

    mode: Literal["parallel", "single", "naive"] = "parallel"
    """``parallel``: through the PCIe links of all GPUs of the domain; ``single``: pipelined through the target's own;
    ``naive``: through its own at ``naive_share`` of its rate (unpipelined copies of pageable tensors)."""
    naive_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.25
    parked_per_device: Annotated[int, Meta(ge=0)] = 1
    kept_models: Annotated[int, Meta(ge=0)] = 2
    """Of how many models an engine keeps what it built; only ``timing.wake`` asks."""
    max_engines_per_device: Count = 64
    fetches_per_node: Count = 2
    """Models that a node fetches over the network at a time; further ones wait their turn."""
    source: Literal["every_node", "spread"] = "every_node"
    """Where weights are at the start: in the memory of every node, or one copy each, dealt out over the nodes."""
    stage_wait: Annotated[float, Meta(ge=0.0)] = STAGE_WAIT
    """What a further leader of an execution pipeline costs all of them, in parts of a step; the default is what the
    prototype showed (two leaders do the work of 1.45 instances, three of 1.7)."""


class FaultSection(Section, frozen=True, kw_only=True):
    """Something that happens at a given time (:mod:`prism.sim.faults`)."""

    at: Seconds
    """Since the trace began."""
    kind: Literal["gpu_fails", "node_fails", "gpu_added", "node_added", "gpu_drained", "straggler", "engine_dies"]
    target: str = ""
    """A device (``node0/cuda:1``); for ``node_fails`` and ``gpu_added`` a node; for ``engine_dies`` a device
    and a model with a space between; for ``node_added`` the GPU of the group it is like (default: the first group)."""
    speed: Positive | None = None
    """Of a ``straggler``, as a share of its normal speed (1: recovered)."""


class Cluster(Section, frozen=True, kw_only=True):
    """The whole file."""

    groups: Annotated[tuple[NodeGroup, ...], Meta(min_length=1)] = field(default_factory=lambda: (NodeGroup(),))
    network: NetworkSection = NetworkSection()
    engine: EngineSection = EngineSection()
    timing: TimingSection = field(default_factory=TimingSection)
    load: LoadSection = LoadSection()
    faults: tuple[FaultSection, ...] = ()
    calibration: str | None = None
    """A measured table (:mod:`prism.sim.calibration`), relative to this file."""

    @property
    def gpus(self) -> int:
        return sum(group.nodes * group.gpus_per_node for group in self.groups)
