"""The section of a catalog about what joins the machines of a fleet."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from prism.config.sections.base import Section
from prism.config.units import Bytes
from prism.policy.multicast.topology import NetworkTopology

_Nodes = Annotated[tuple[str, ...], Meta(min_length=1, description="Names of machines, as `prism-node --name` gives.")]


class LeafSwitch(Section, frozen=True, kw_only=True):
    """Machines under one switch."""

    nodes: _Nodes
    uplink_bytes_s: Annotated[
        Bytes | None,
        Meta(
            description="What they send to other switches and get from there, all together, per second each way; null: "
            "as much as they can, until transfers show that it is less."
        ),
    ] = field(name="uplink", default=None)


class FastDomain(Section, frozen=True, kw_only=True):
    """Machines that copy to each other over links of their own: NVLink across machines, or one machine that has an
    agent for each of its network cards."""

    nodes: _Nodes
    link_bytes_s: Annotated[
        Bytes | None,
        Meta(description="What one sends to another, per second; null: 50 GB, until transfers show what it is."),
    ] = field(name="link", default=None)


class TopologyConfig(Section, frozen=True, kw_only=True):
    """What joins the machines of a fleet, for who sends weights to whom. Machines that are not named are in no domain,
    and all under one switch."""

    leaves: Annotated[tuple[LeafSwitch, ...], Meta(description="Leaf switches.")] = ()
    domains: Annotated[tuple[FastDomain, ...], Meta(description="Fast domains.")] = ()

    def known(self) -> NetworkTopology:
        """As planners read it; switches and domains are called by their numbers."""
        leaves = {f"leaf {i}": leaf for i, leaf in enumerate(self.leaves)}
        domains = {f"domain {i}": domain for i, domain in enumerate(self.domains)}
        return NetworkTopology(
            domains={node: name for name, domain in domains.items() for node in domain.nodes},
            leaves={node: name for name, leaf in leaves.items() for node in leaf.nodes},
            domain_bytes_s={n: float(d.link_bytes_s) for n, d in domains.items() if d.link_bytes_s},
            uplink_bytes_s={n: float(leaf.uplink_bytes_s) for n, leaf in leaves.items() if leaf.uplink_bytes_s},
        )
