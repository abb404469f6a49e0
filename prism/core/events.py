"""What the global scheduler is told (:mod:`prism.scheduler.cluster`); what a device's scheduler is told:
:mod:`prism.core.device_events`. Frozen values; the time at which one happened is the ``now_s`` given to ``on_event``.
The live shells and the simulator make the same events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.instances import InstanceKey, Parts
from prism.core.specs import DeviceSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent when the scheduler's ``wake_s`` is reached. Never needed at a fixed rate."""


class ActivationError(StrEnum):
    """Why an activation did not happen. The permanent ones are not tried again until the catalog entry changes or an
    operator loads the model."""

    NO_MEMORY = "no_memory"
    """The device's account refused the weights; somebody holds more than the view said."""
    WEIGHTS_MISSING = "weights_missing"
    WEIGHTS_CORRUPT = "weights_corrupt"
    UNSUPPORTED = "unsupported"
    """The engine cannot run this architecture or these engine arguments."""
    ENGINE_DIED = "engine_died"
    TIMEOUT = "timeout"
    STALE = "stale"
    """The owner's state had moved on; nothing was tried."""

    @property
    def permanent(self) -> bool:
        return self in (ActivationError.WEIGHTS_MISSING, ActivationError.WEIGHTS_CORRUPT, ActivationError.UNSUPPORTED)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``count`` requests for ``model`` reached the front doors since the last such event (active or not).
    The scheduler keeps the sliding-window rate and the idle-interval distribution from these."""

    model: ModelName
    count: int


@dataclass(frozen=True, slots=True)
class WaitingRequests:
    """State of the inactive queue for one model, sent when it changed: how many wait and since when the oldest does.
    ``count`` 0: nothing waits any more (moved, refused or cancelled)."""

    model: ModelName
    count: int
    oldest_arrival_s: float
    tokens: int = 0
    """Their prompt tokens in all (used by ``qlm``'s waiting-time estimate)."""
    tightest_deadline_s: float = float("inf")
    """Earliest TTFT deadline among them."""


@dataclass(frozen=True, slots=True)
class WaitingDealt:
    """What waited for the model is being given to its instances as they come up, and reports do not show it yet
    (``settled`` False), or do now (True): in between nothing can be shared out by reports."""

    model: ModelName
    settled: bool


class InstanceLoad(NamedTuple):
    """One instance's part of a device, in a :class:`DeviceReport`."""

    key: InstanceKey
    weight_bytes: int
    kv_bytes: int
    """Mapped KV memory, prefix cache included."""
    kv_idle_bytes: int
    """The part of it that only caches: given back when somebody needs it."""
    running: int
    """Dispatched requests that have not finished (rank 0 only; other ranks say 0)."""
    waiting: int
    """Requests of this model in the device's queue."""
    served: int = 0
    """Requests that got their first token from this instance."""
    idle_s: float = 0.0
    """How long it has had no request (rank 0 only); 0 while it has one. An age: clocks of machines differ."""
    waited_s: float = 0.0
    """How long requests of the model have been waiting in the device's queue without a break, or what they take to
    prefill if that is longer (rank 0 only); 0 when none waits. An age."""
    token_s: float = 0.0
    """Mean time of a token, after the first, of the answers that ended lately (rank 0 only); 0: none did."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a device holds; sent when it changed, once a second at most, when a model reaches its keep-alive, when
    memory has become short, and when requests of a model wait for longer than they can bear."""

    device: DeviceId
    capacity_bytes: int
    free_bytes: int
    instances: tuple[InstanceLoad, ...]
    memory_short_s: float = 0.0
    """How long requests have been waiting for memory, when that is more than they can bear
    (:mod:`prism.scheduler.shortage`); else 0. An age."""


@dataclass(frozen=True, slots=True)
class ActivationFinished:
    """The instance serves from now on."""

    key: InstanceKey
    seconds: float
    early: bool = False
    """Before all its weights are there: ``seconds`` say nothing of those."""
    whole_only: str = ""
    """Why no instance of the model can serve earlier, as an engine said."""


@dataclass(frozen=True, slots=True)
class ActivationFailed:
    """The instance does not exist; nothing of it is left on its devices."""

    key: InstanceKey
    error: ActivationError
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DeactivationFinished:
    """The instance is gone and its memory is free."""

    key: InstanceKey


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """An instance that served, loaded or drained is gone without having been told to (its engine died)."""

    key: InstanceKey
    stillborn: str = ""
    """What its engine died of, when it died by itself before any request had a token of it; else empty."""


@dataclass(frozen=True, slots=True)
class InstanceFound:
    """A node agent reports an instance that serves, or is loading: the scheduler has just started and takes it over. Of
    one that is loading it hears again when it serves."""

    key: InstanceKey
    parts: Parts
    loading: bool = False


@dataclass(frozen=True, slots=True)
class NodeJoined:
    node: NodeId
    devices: tuple[DeviceSpec, ...]
    found: tuple[InstanceFound, ...] = ()
    """Instances that serve with it already: they are in the books before anything is decided about its devices."""
    drains: tuple[OperatorDrain, ...] = ()
    """What operators want empty of its devices."""


@dataclass(frozen=True, slots=True)
class FleetKnown:
    """A scheduler that takes over has heard all machines that are up, or has waited for them long enough: from now on
    it decides."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node's lease ran out; all instances with a device there are gone."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """One device failed; all instances with a shard on it are gone."""

    device: DeviceId


@dataclass(frozen=True, slots=True)
class CatalogChanged:
    """``upserted`` replaces or adds entries, ``removed`` ones are refused from now on and unloaded."""

    upserted: tuple[ModelSpec, ...] = ()
    removed: tuple[ModelName, ...] = ()


@dataclass(frozen=True, slots=True)
class PinChanged:
    """A pinned model is loaded at once, kept, and never evicted."""

    model: ModelName
    pinned: bool


@dataclass(frozen=True, slots=True)
class OperatorLoad:
    """Load the model now, on ``devices`` if given (one per rank), else where placement says. Clears a failure."""

    model: ModelName
    devices: tuple[DeviceId, ...] = ()
    instances: int = 1
    """So many of it, in free room and each on devices of its own; what is there already counts."""


@dataclass(frozen=True, slots=True)
class OperatorUnload:
    """Let the model leave ``devices`` (none: all); it comes back when a request for it arrives. ``carry``: running
    requests move with their tokens instead of finishing first."""

    model: ModelName
    devices: tuple[DeviceId, ...] = ()
    carry: bool = False


@dataclass(frozen=True, slots=True)
class OperatorDrain:
    """Empty the devices and place nothing there (``on``), or take them back into service. ``carry``: running requests
    move with their tokens instead of finishing first. Devices that are to be empty together are named together, so that
    what leaves one does not go to another."""

    devices: tuple[DeviceId, ...]
    on: bool = True
    carry: bool = False


ClusterEvent = (
    Arrivals
    | WaitingRequests
    | WaitingDealt
    | DeviceReport
    | ActivationFinished
    | ActivationFailed
    | DeactivationFinished
    | InstanceLost
    | InstanceFound
    | NodeJoined
    | FleetKnown
    | NodeLost
    | DeviceLost
    | CatalogChanged
    | PinChanged
    | OperatorLoad
    | OperatorUnload
    | OperatorDrain
    | Tick
)
