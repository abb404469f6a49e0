"""The links of a cluster: which ones a transfer between two memories crosses.

::

    host memory --(dram)--> PCIe of a GPU --> GPU --NVLink out--> switch --NVLink in--> GPU     (one domain)
    host memory --> NIC up --> leaf --(uplink, if another leaf)--> spine --> leaf --> NIC down --> host memory
    SSD --> host memory

An NVLink domain is a node or a part of one. Both directions of a link are independent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.core.ids import DeviceId, NodeId
from prism.sim.links import Link


@dataclass(slots=True)
class NodeLinks:
    """Of one machine."""

    dram: Link
    """Reading host memory for all its GPUs together."""
    nic_up: Link
    nic_down: Link
    ssd: Link
    leaf: int
    """Index of its leaf switch."""


@dataclass(slots=True)
class DeviceLinks:
    """Of one device."""

    pcie: Link
    """Host memory to device."""
    nvlink_out: Link | None
    nvlink_in: Link | None
    node: NodeId
    domain: str


@dataclass(slots=True)
class Topology:
    """Finds paths. Nodes and devices may be added while the world runs."""

    nodes: dict[NodeId, NodeLinks] = field(default_factory=dict)
    devices: dict[DeviceId, DeviceLinks] = field(default_factory=dict)
    domains: dict[str, dict[DeviceId, None]] = field(default_factory=dict)
    """Devices that NVLink joins, by domain (always within a node)."""
    leaf_up: dict[int, Link] = field(default_factory=dict)
    """Only of oversubscribed leaves: others can carry whatever their nodes send."""
    leaf_down: dict[int, Link] = field(default_factory=dict)

    def load_path(self, node: NodeId, helper: DeviceId, target: DeviceId) -> tuple[Link, ...]:
        """From the memory of ``node`` to ``target`` through the PCIe link of ``helper`` (which may be ``target``)."""
        path = (self.nodes[node].dram, self.devices[helper].pcie)
        return path if helper == target else path + self.nvlink_path(helper, target)

    def nvlink_path(self, source: DeviceId, target: DeviceId) -> tuple[Link, ...]:
        """Between two devices of one domain."""
        out, into = self.devices[source].nvlink_out, self.devices[target].nvlink_in
        assert out is not None and into is not None  # helpers() only names devices that have NVLink
        return (out, into)

    def network_path(self, source: NodeId, target: NodeId) -> tuple[Link, ...]:
        """Between the host memories of two nodes."""
        a, b = self.nodes[source], self.nodes[target]
        if a.leaf == b.leaf or a.leaf not in self.leaf_up:
            return (a.nic_up, b.nic_down)
        return (a.nic_up, self.leaf_up[a.leaf], self.leaf_down[b.leaf], b.nic_down)

    def helpers(self, target: DeviceId) -> list[DeviceId]:
        """Devices that can take part in loading ``target``: those of its node and domain, itself first."""
        links = self.devices[target]
        if links.nvlink_in is None:
            return [target]
        return [target, *(name for name in self.domains[links.domain] if name != target)]

    def add_device(self, device: DeviceId, links: DeviceLinks) -> None:
        self.devices[device] = links
        if links.nvlink_out is not None:
            self.domains.setdefault(links.domain, {})[device] = None

    def remove_device(self, device: DeviceId) -> set[Link]:
        """The device is gone; returns its links."""
        links = self.devices.pop(device)
        if links.nvlink_out is not None:
            del self.domains[links.domain][device]
        return {link for link in (links.pcie, links.nvlink_out, links.nvlink_in) if link is not None}
