"""The machines of a world: nodes and devices with their links, made from the cluster file and added in mid-run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prism.core.ids import DeviceId, NodeId, device_id
from prism.core.pace import DevicePace
from prism.core.specs import DeviceSpec
from prism.sim.calibration import Calibration
from prism.sim.cluster_sections import Cluster, NodeGroup
from prism.sim.device import SimDevice
from prism.sim.fetch import Fetcher
from prism.sim.gpus import GpuKind, gpu, with_rates
from prism.sim.host_cache import HostCache
from prism.sim.links import Link, Network
from prism.sim.sharing import Crowd, Pool
from prism.sim.topology import DeviceLinks, NodeLinks, Topology

MakeDevice = Callable[[DeviceSpec, GpuKind, Pool, DevicePace | None], SimDevice]

USABLE: Final = 0.9
"""Share of a GPU's memory that models may use when the cluster file says nothing."""


class Machines:
    """Makes nodes and devices; knows what is particular to them (group, pool, queue for fetching weights)."""

    def __init__(
        self,
        cluster: Cluster,
        calibration: Calibration | None,
        network: Network,
        topology: Topology,
        host_cache: HostCache,
        make_device: MakeDevice,
        parked_per_device: int = 0,
    ) -> None:
        """``parked_per_device`` engines take their part of each device for good."""
        self._cluster, self._calibration, self._make_device = cluster, calibration, make_device
        self._parked_per_device = parked_per_device
        self._network, self._topology, self._host_cache = network, topology, host_cache
        self.devices: dict[DeviceId, SimDevice] = {}
        self.groups: dict[NodeId, NodeGroup] = {}
        self._pools: dict[NodeId, Pool] = {}
        self._fetchers: dict[NodeId, Fetcher] = {}
        self._indices: dict[NodeId, int] = {}

    def add_node(self, group_index: int) -> list[SimDevice]:
        """One more node of a group of the cluster file (the controller is not told)."""
        group, network = self._cluster.groups[group_index], self._cluster.network
        number = len(self.groups)
        node = NodeId(f"node{number}")
        nic = network.nic_gbit * 1e9 / 8 * network.efficiency
        leaf = number // network.nodes_per_leaf
        uplink = nic * network.nodes_per_leaf / network.oversubscription
        if network.oversubscription > 1.0:
            self._topology.leaf_up.setdefault(leaf, Link(f"leaf{leaf} up", uplink))
            self._topology.leaf_down.setdefault(leaf, Link(f"leaf{leaf} down", uplink))
        self._topology.nodes[node] = NodeLinks(
            dram=Link(f"{node} dram", group.dram_gbytes_per_s * 1e9),
            nic_up=Link(f"{node} nic up", nic),
            nic_down=Link(f"{node} nic down", nic),
            ssd=Link(f"{node} ssd", network.ssd_gbytes_per_s * 1e9),
            leaf=leaf,
        )
        self.groups[node] = group
        self._host_cache.add_node(node, int(group.host_memory))
        return [self.add_device(node) for _ in range(group.gpus_per_node)]

    def add_device(self, node: NodeId) -> SimDevice:
        """One more device on ``node``, like the others of its group (the controller is not told)."""
        group = self.groups[node]
        kind = self._gpu(group)
        index = self._indices[node] = self._indices.get(node, -1) + 1
        name = device_id(node, kind.device_kind.value, index)
        domain = f"{node}/{index // (group.domain_gpus or 1 << 30)}"
        page_bytes = kind.page_bytes
        memory_bytes = int(group.memory or kind.memory_bytes * USABLE)
        memory_bytes -= int(self._parked_per_device * kind.parked_bytes)
        engine_bytes = -(-int(kind.process_bytes) // page_bytes) * page_bytes
        spec = DeviceSpec(
            name, node, kind.device_kind, memory_bytes, domain, page_bytes, page_bytes, engine_bytes=engine_bytes
        )
        pace = group.pace.declared() if group.pace is not None else None
        device = self._make_device(spec, kind, self._pool(node, kind, group), pace)
        nvlink = kind.nvlink_bytes_per_s
        links = DeviceLinks(
            pcie=Link(f"{name} pcie", kind.pcie_bytes_per_s * kind.pcie_efficiency),
            nvlink_out=Link(f"{name} nvlink out", nvlink) if nvlink else None,
            nvlink_in=Link(f"{name} nvlink in", nvlink) if nvlink else None,
            node=node,
            domain=domain,
        )
        self._topology.add_device(name, links)
        self.devices[name] = device
        return device

    def remove_links(self, devices: Iterable[DeviceId]) -> set[Link]:
        """The devices are gone; returns their links."""
        return {link for device in devices for link in self._topology.remove_device(device)}

    def remove_node_memory(self, node: NodeId) -> Link:
        """The node is gone with all that its memory held; returns the link that others read from it over."""
        self._host_cache.remove_node(node)
        return self._topology.nodes[node].nic_up

    def gpus(self) -> list[str]:
        """The GPU of each group of the cluster file."""
        return [group.gpu for group in self._cluster.groups]

    def _pool(self, node: NodeId, kind: GpuKind, group: NodeGroup) -> Pool:
        if not group.shared_compute:
            return Pool(kind.overlap_gain, group.background_load)
        if node not in self._pools:
            crowd = Crowd(group.cores, group.crowding) if group.cores else None
            self._pools[node] = Pool(kind.overlap_gain, group.background_load, crowd)
        return self._pools[node]

    def front_slowdown(self) -> float:
        """How many times longer the front door takes where it runs on cores that engines use (the first group's): it is
        a thread like each of them. That engines take more than a core from each other (their measured share) does not
        hold for it: beside one engine of two cores it is as fast as alone."""
        group = self._cluster.groups[0]
        if not group.shared_compute:
            return 1.0
        return next(iter(self._pools.values())).beside_threads(gpu(group.gpu).engine_share)

    def fetcher(self, node: NodeId) -> Fetcher:
        """What brings weights to ``node``."""
        found = self._fetchers.get(node)
        if found is None:
            found = self._fetchers[node] = Fetcher(self._network, self._cluster.load.fetches_per_node)
        return found

    def _gpu(self, group: NodeGroup) -> GpuKind:
        kind, calibration = with_rates(gpu(group.gpu), group.rates), self._calibration
        return calibration.gpu(kind) if calibration is not None else kind
