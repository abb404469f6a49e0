"""What the scheduler of one device is told (:mod:`prism.scheduler.gpu`); what the global one is told:
:mod:`prism.core.events`. Frozen values; the time at which one happened is the ``now_s`` given to ``on_event``. The live
shells and the simulator make the same events.
"""

from __future__ import annotations

from dataclasses import dataclass

from prism.core.events import Tick
from prism.core.ids import RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.specs import DeviceRates, Prefer


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
    """An instance's engine serves, and this device's queue takes its requests (for tensor parallelism: this device has
    rank 0). It gets the model's new requests from now on; an older instance of the model that is still here finishes
    what it has."""

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
    stands_still: bool = True
    """It can be told to make no decode step for a moment (:mod:`prism.policy.pauses`): not one of several devices, nor
    one that takes requests larger than its device."""


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
    """Slots for which the window of a request that is larger than the device has memory: others of the engine that
    wait get it (:class:`prism.policy.long_turns.WindowTurns`), and other models of the device; its bytes are in
    :class:`MemoryReport`, too. 0: there is no window now."""
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
