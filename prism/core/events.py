"""What the schedulers are told. Frozen values; the time at which one happened is the ``now_s`` given to ``on_event``.

``GpuEvent`` goes to the scheduler of one device (:mod:`prism.scheduler.gpu`), ``ClusterEvent`` to the global one
(:mod:`prism.scheduler.cluster`). The live shells and the simulator make the same events.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prism.core.ids import DeviceId, ModelName, NodeId, RequestId
from prism.core.instances import InstanceKey, Parts
from prism.core.request import Request
from prism.core.specs import DeviceRates, DeviceSpec, ModelSpec, Prefer


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent when the scheduler's ``wake_s`` is reached. Never needed at a fixed rate."""


# --- one device ---


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request entered this device's queue. The scheduler owns it until it dispatches, refuses or sends it back."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away. Answered with ``Abort`` if the request was dispatched, with nothing if it waited."""

    id: RequestId


@dataclass(frozen=True, slots=True)
class EngineUp:
    """An instance's engine serves, and this device's queue takes its requests (for tensor parallelism: it has rank 0).
    It gets the model's new ones from now on; an older instance of the model that is still here finishes its own."""

    key: InstanceKey
    prefill_tokens_per_s: float
    """First guess of the prefill speed; corrected from what is measured."""
    kv_bytes_per_token: int
    """On this device (the shard's part)."""
    max_running: int
    """Most requests the engine runs at once."""
    chunk_tokens: int = 8192
    """Tokens one prefill step takes: a request can start at once while less than this is being prefilled."""
    max_request_tokens: int = 0
    """Most tokens (prompt and output) of one request; 0: no bound of its own."""
    elastic: bool = True
    """The engine takes KV memory from the device's free memory when its own is used up; False: a fixed share."""
    kv_page_bytes: int = 1
    """It takes whole pages of this size."""
    fair: bool = False
    """Its requests take turns (:attr:`prism.core.specs.Scheduling.FAIR`): it takes more than it has memory for."""
    device_tokens: int = 0
    """Most tokens of a request that is served on the device alone; larger ones have their KV outside and take a window
    of it (:mod:`prism.policy.long_prompts`). 0: there is no such difference."""
    no_long: str = ""
    """Why larger ones are refused although they are allowed; else empty."""
    weight_bytes: int = 0
    """That a decode step reads on this device (the shard's part)."""
    slo_tpot_s: float = float("inf")
    """The model's objective for a token after the first."""
    prefer: Prefer = Prefer.BOTH
    rates: DeviceRates | None = None
    """What its decode steps cost by the model's profile; None: what devices of the kind are guessed to."""


@dataclass(frozen=True, slots=True)
class EngineDraining:
    """The instance leaves: running requests finish, nothing new may be dispatched to it; what waits for its model is
    sent back unless another instance of it is here."""

    key: InstanceKey


@dataclass(frozen=True, slots=True)
class EngineDown:
    """The engine is gone (left or died). What waits is sent back unless another instance of the model is here; for each
    request that was dispatched ``AttemptLost`` follows once its delivered tokens are known."""

    key: InstanceKey


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's own counters; sent when they changed, a few times a second at most."""

    key: InstanceKey
    running: int
    waiting: int
    """Requests that queue inside the engine: dispatched and not yet begun, or retracted."""
    free_kv_tokens: int
    """Token slots that the engine can use without new device memory: free ones in its mapped pages and evictable
    prefix-cache ones. For tensor parallelism the least over the ranks."""
    cached_kv_tokens: int = 0
    """The part of ``free_kv_tokens`` that is prefix cache; its bytes are in :class:`MemoryReport` too."""
    window_tokens: int = 0
    """Slots for which the window of a request that is larger than the device has memory, which others that wait get
    (:class:`prism.policy.long_turns.WindowTurns`); its bytes are in :class:`MemoryReport`, too. 0: no window now."""
    ahead: int = 1
    """Steps' worth of prompts that it may have at once: several, where it begins some while others are in engines that
    run layers for it."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The request's prefill is done."""

    id: RequestId


@dataclass(frozen=True, slots=True)
class Finished:
    """The request's last token is out (or it ended with an error that was reported): forget it."""

    id: RequestId
    generated_tokens: int = 0
    """Of all its attempts; 0: not known."""


@dataclass(frozen=True, slots=True)
class AttemptLost:
    """The engine that ran the request is gone; ``generated_tokens`` were delivered by all attempts so far.
    The scheduler dispatches it again if the model serves here, else it sends it back."""

    id: RequestId
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class DispatchRejected:
    """The agent could not hand the request to the engine (its generation had moved on, its socket was gone)."""

    id: RequestId


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the device's account has left that any engine may take; prefix caches, which are given back on demand,
    count as free."""

    free_bytes: int
    wanted_bytes: int = 0
    """What engines with requests lack and wait for."""


@dataclass(frozen=True, slots=True)
class WaitingShared:
    """Other instances of the model serve now: all but ``kept_share`` (0..1) of the requests that wait for this one are
    sent back, the last in its order. Sent for the cluster's :class:`~prism.core.effects.ShareWaiting`."""

    key: InstanceKey
    kept_share: float


GpuEvent = (
    RequestArrived
    | RequestCancelled
    | EngineUp
    | EngineDraining
    | WaitingShared
    | EngineDown
    | EngineLoad
    | FirstToken
    | Finished
    | AttemptLost
    | DispatchRejected
    | MemoryReport
    | Tick
)

# --- the cluster ---


class ActivationError(StrEnum):
    """Why an activation did not happen. The permanent ones are not tried again until the catalog entry changes or an
    operator loads the model."""

    NO_MEMORY = "no_memory"
    """The device's account refused the weights."""
    WEIGHTS_MISSING = "weights_missing"
    WEIGHTS_CORRUPT = "weights_corrupt"
    UNSUPPORTED = "unsupported"
    """The engine cannot run this architecture or these arguments."""
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


@dataclass(frozen=True, slots=True)
class InstanceLoad:
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
    """A node agent reports an instance that serves: the scheduler has just started and takes it over."""

    key: InstanceKey
    parts: Parts


@dataclass(frozen=True, slots=True)
class NodeJoined:
    node: NodeId
    devices: tuple[DeviceSpec, ...]


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
    """Empty the devices and place nothing there (``on``), or take them back into service. ``carry``: as above. Devices
    that are to be empty together are named together, so that what leaves one does not go to another."""

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
    | NodeLost
    | DeviceLost
    | CatalogChanged
    | PinChanged
    | OperatorLoad
    | OperatorUnload
    | OperatorDrain
    | Tick
)
