"""A frozen picture of the cluster, as the global scheduler saw it at one time: input of ``plan``, output of ``ps``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import Parts, devices_of
from prism.core.reasons import Reason


class InstanceState(StrEnum):
    """Life of one instance, everywhere: in schedulers, on the wire, in the store, in what operators are shown. The
    values are stable."""

    WAITING = "waiting"
    """Its memory is promised; no command was sent yet, for others have to leave first."""
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class InstanceView:
    generation: Generation
    parts: Parts
    state: InstanceState
    running: int
    waiting: int
    kv_bytes: int
    since_s: float
    """When it came into this state."""
    idle_since_s: float | None
    """None while it has requests."""

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """All devices of all parts."""
        return devices_of(self.parts)


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model that is loaded, wanted or failed. Idle models without an instance are left out of a view."""

    name: ModelName
    rate_per_s: float
    slo_ttft_s: float
    weight_bytes: int
    min_kv_bytes: int
    tp: int
    pinned: bool
    waiting: int
    oldest_wait_s: float
    activation_s: float
    """Expected time of an activation."""
    instances: tuple[InstanceView, ...]
    failure: str = ""
    """The last activation error while it still holds the model back."""
    retry_at_s: float | None = None

    @property
    def weighted_rate(self) -> float:
        """``r / s`` of Algorithm 1: requests per second, per second of objective."""
        return self.rate_per_s / self.slo_ttft_s


@dataclass(frozen=True, slots=True)
class DeviceView:
    id: DeviceId
    node: NodeId
    domain: str
    capacity_bytes: int
    free_bytes: int
    """From the device's last report; the capacity before the first one."""
    draining: bool
    weight_bytes: int
    """Weights placed or promised here."""
    weighted_rate: float
    """Sum of ``r / s`` of the shards here."""

    @property
    def kvpr(self) -> float:
        """KV pressure ratio (Prism, section 6.2); infinite when weights leave nothing for KV."""
        shared = self.capacity_bytes - self.weight_bytes
        if shared <= 0:
            return float("inf")
        return self.weighted_rate / shared


@dataclass(frozen=True, slots=True)
class ClusterView:
    at_s: float
    policy: str
    devices: tuple[DeviceView, ...]
    models: tuple[ModelView, ...]

    def as_dict(self) -> dict[str, Any]:
        """As operators' views show it and a dry run reads it: instances name their devices beside their parts."""
        view = asdict(self)
        for shown, model in zip(view["models"], self.models, strict=True):
            for instance, known in zip(shown["instances"], model.instances, strict=True):
                instance["devices"], instance["parts"] = known.devices, [part.as_dict() for part in known.parts]
        return view


@dataclass(frozen=True, slots=True)
class PlannedDecision:
    """One line of ``prism plan``: what would happen to a model now, and why."""

    model: ModelName
    action: str
    """``stay``, ``move``, ``activate``, ``evict``, ``wait`` or ``refuse``; ``send``: weights on their way."""
    current: tuple[str, ...]
    """Devices; of ``send`` the machines that have the weights."""
    target: tuple[str, ...]
    """Devices; of ``send`` the machines that get them."""
    reason: Reason

    def as_dict(self) -> dict[str, object]:
        """For operators, as JSON can have it."""
        ends = {"current": list(self.current), "target": list(self.target)}
        return {"model": self.model, "action": self.action, **ends, "reason": self.reason.as_dict()}
