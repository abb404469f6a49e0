"""Links of one server for KV that moves: host memory, peers, the network, and the devices' own memory.

::

    host memory --PCIe in--> device a <--NVLink--> device b      each direction is a link of its own; a copy to or
    host memory <--PCIe out-       |                             from a device also reads or writes its memory, which
                                 memory (weights, KV of steps)   decode steps read at the same time
    network <---> PCIe out, in

A step that reads weights and KV is a flow over its device's memory, so that what a lender loses to those who copy out
of its memory comes from the same fair shares (:mod:`prism.sim.links`) as everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prism.core.errors import InvalidValue
from prism.sim.gpus import GpuKind
from prism.sim.links import Flow, Link, Network


class KvTier(StrEnum):
    """Where KV can be beside devices, which are called by name."""

    HOST = "host"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class _DeviceLinks:
    host_in: Link
    host_out: Link
    peer_in: Link
    peer_out: Link
    memory: Link
    lent: Link | None
    """The part of it that those who borrow from it may take together; None: it lends nothing."""


class KvLinks:
    """Devices of one kind in one server, all peers of each other. ``network_bytes_s``: of the server, each way.
    ``lenders``: of these devices all copies to and from other ones together take ``lent_share`` of the memory's
    bandwidth at the most (``kv.lend_rate_fraction``)."""

    def __init__(
        self,
        network: Network,
        gpu: GpuKind,
        devices: Sequence[str],
        network_bytes_s: float,
        lenders: Collection[str] = (),
        lent_share: float = 1.0,
    ) -> None:
        self._network = network
        pcie = gpu.pcie_bytes_per_s * gpu.pcie_efficiency
        peer = gpu.nvlink_bytes_per_s or pcie
        memory = gpu.memory_bytes_per_s * gpu.memory_efficiency

        def of(name: str) -> _DeviceLinks:
            rates = {"host_in": pcie, "host_out": pcie, "peer_in": peer, "peer_out": peer}
            rates |= {"memory": memory}
            lent = Link(f"{name} lent", lent_share * memory) if name in lenders else None
            return _DeviceLinks(**{kind: Link(f"{name} {kind}", rate) for kind, rate in rates.items()}, lent=lent)

        self._devices = {name: of(name) for name in devices}
        self._net_in, self._net_out = Link("net in", network_bytes_s), Link("net out", network_bytes_s)

    def path(self, source: str, target: str) -> Mapping[Link, float]:
        """What KV crosses from ``source`` to ``target``, each a device's name or a :class:`KvTier`. Raises
        :class:`InvalidValue` for a place that is not there and for a way that touches no device."""
        a, b = self._place("source", source), self._place("target", target)
        if a is None and b is None:
            raise InvalidValue("target", target, "one end of a move is a device", sorted(self._devices))
        crossed: list[Link] = [end.memory for end in (a, b) if end is not None]
        if a is not None and b is not None:
            crossed += [a.peer_out, b.peer_in, *(end.lent for end in (a, b) if end.lent is not None)]
        elif b is not None:
            crossed += [b.host_in] + ([self._net_in] if source == KvTier.NETWORK else [])
        elif a is not None:
            crossed += [a.host_out] + ([self._net_out] if target == KvTier.NETWORK else [])
        return dict.fromkeys(crossed, 1.0)

    def move(self, source: str, target: str, nbytes: float, on_done: Callable[[], None]) -> Flow:
        """Begins; ``on_done`` is called when the last byte is there. Raises like :meth:`path`."""
        return self._network.start(self.path(source, target), nbytes, on_done)

    def step(self, device: str, nbytes: float, on_done: Callable[[], None]) -> Flow:
        """A decode step that reads so many bytes of the device's memory (weights and KV)."""
        return self._network.start({self._devices[device].memory: 1.0}, nbytes, on_done)

    def _place(self, field: str, name: str) -> _DeviceLinks | None:
        if name in self._devices:
            return self._devices[name]
        if name not in list(KvTier):
            raise InvalidValue(field, name, "is no place of this server", [*self._devices, *KvTier])
        return None
