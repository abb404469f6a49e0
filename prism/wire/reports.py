"""What a node says of itself: the parts of an :class:`prism.wire.messages.AgentReport`.

Rules of change are those of the messages: fields are only added, with a default.
"""

from __future__ import annotations

import msgspec

from prism.core.ids import DeviceId, NodeId, node_of
from prism.core.instances import InstanceKey, Parts, devices_of
from prism.core.pace import DevicePace
from prism.core.views import InstanceState


class RemoteReport(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that leads its requests over other engines, or runs layers for them, in an
    :class:`InstanceReport`."""

    layers: int
    held_layers: int
    """Those whose weights are there."""
    peers: list[str] = []
    """Devices of the instances that run layers for it; it has not all weights, or does not use them yet."""
    leaders: list[str] = []
    """Devices of the instances for which it runs layers."""


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one instance that stand on the node, in an :class:`AgentReport`."""

    key: InstanceKey
    parts: Parts
    """All of the instance's; the numbers are of those on the node."""
    state: InstanceState
    weight_bytes: int = 0
    """On each device."""
    kv_bytes: int = 0
    kv_idle_bytes: int = 0
    borrowed_bytes: int = 0
    """KV of the model in memory that devices of the node lend, all together."""
    long_host_bytes: int = 0
    """KV of prompts that are larger than their device, in host memory of the node."""
    long_lent_bytes: int = 0
    """The same in memory that devices lend, part of :attr:`borrowed_bytes`."""
    running: int = 0
    waiting: int = 0
    served: int = 0
    """Requests that got their first token from this instance."""
    idle_s: float = 0.0
    """How long it has had no request; 0 while it has one."""
    waited_s: float = 0.0
    """How long requests have been waiting for it without a break, or what they take to prefill if that is longer; 0
    when none waits."""
    token_s: float = 0.0
    """Mean time of a token, after the first, of the answers that ended lately; 0: none did."""
    adapters: list[str] = []
    """LoRA adapters in device memory."""
    remote: RemoteReport | None = None
    """None: no layers of it run in other engines, and it runs none for others."""

    def devices_on(self, node: NodeId) -> tuple[DeviceId, ...]:
        """Those of the instance's devices that the numbers are of."""
        return tuple(device for device in devices_of(self.parts) if node_of(device) == node)

    def as_dict(self, node: NodeId) -> dict[str, object]:
        """For operators' views: what stands on ``node``."""
        shown = {**msgspec.to_builtins(self), **self.key._asdict(), "devices": self.devices_on(node)}
        shown["parts"] = [part.as_dict() for part in self.parts]
        del shown["key"]
        return shown


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the node, in an :class:`AgentReport`."""

    id: str
    kind: str
    domain: str
    capacity_bytes: int
    free_bytes: int
    page_bytes: int = 0
    weight_page_bytes: int = 0
    max_engines: int = 0
    engine_bytes: int = 0
    """See :class:`prism.core.specs.DeviceSpec`."""
    memory_short_s: float = 0.0
    """See :class:`prism.core.events.DeviceReport`."""
    fault: str = ""
    """Why no engine can run there; "": engines can."""
    pace: DevicePace | None = None
    """See :class:`prism.core.specs.DeviceSpec`."""


class PackReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pack that the node holds whole, in an :class:`AgentReport`."""

    model: str
    """Fingerprint."""
    layout: str
    nbytes: int
    in_memory: bool
    first: list[tuple[float, float]] = []
    """Where in its data, as fractions (from, to) of it, what an instance needs before it can serve lies: embedding,
    first layer and head."""
    ends: list[tuple[float, float]] = []
    """What of ``first`` only who leads requests needs: embedding and head, where no layer lies beside them."""


class ArrivalReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pack on its way to the node, in an :class:`AgentReport`; for some seconds after its end, too."""

    session: str
    model: str
    """The catalog's name."""
    mark: str
    layout: str
    bytes_all: int
    bytes_done: int
    pieces_all: int
    pieces_done: int
    sources: dict[str, tuple[int, int, float]] = {}
    """By sending node: pieces and bytes that came, and seconds of transfer."""
    rerouted: int = 0
    """Transfers that were given up and asked for elsewhere."""
    took_s: float | None = None
    """None: not complete."""
    error: str = ""
    """Why it ended without being complete."""


class Stillborn(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that died by itself before any request had a token of it, in an :class:`AgentReport`."""

    key: InstanceKey
    reason: str
    """The engine's own words."""


class EngineDeath(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that died, in an :class:`AgentReport`."""

    key: InstanceKey
    reason: str
    """Its own words, or what it was killed by."""
    at_s: float
    """Unix time."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What bytes from another node to this one reached, in an :class:`AgentReport`."""

    source: str
    bytes_s: float
    age_s: float
    """How long ago that was."""
