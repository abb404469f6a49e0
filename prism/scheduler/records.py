"""What the cluster scheduler knows of one instance, one model and one device. Values that change; no decisions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from prism.core.events import DeviceReport
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey, Parts, devices_of, queue_device
from prism.core.reasons import Reason
from prism.core.settings import LiveMode
from prism.core.specs import DeviceSpec, ModelSpec
from prism.core.views import InstanceState
from prism.policy.demand import IdleIntervals, SlidingRate
from prism.policy.goodput import SharingModel
from prism.policy.pressure import Shard

BURST_WINDOW_S = 1.0
"""Window of the rates of the last moments."""
_LATELY_S = 20.0
"""Time constant of what an instance did lately."""


@dataclass(slots=True)
class InstanceRecord:
    """One copy of a model, from the promise of memory to the end of its deactivation."""

    key: InstanceKey
    parts: Parts
    shards: dict[DeviceId, Shard]
    """What each of its devices carries for it; the rates change with demand, and are 0 once it drains."""
    state: InstanceState
    since_s: float
    reason: Reason
    kv_cap_bytes: int | None = None
    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    idle_s: float = 0.0
    """How long it had been idle in the last report that showed it so."""
    idle_since_s: float | None = None
    served: bool = False
    first_tokens: int = 0
    """Requests that got their first token from it, as of its last report."""
    waited_s: float = 0.0
    """How long its requests had been waiting at the last report, or what they take to prefill if that is longer."""
    duty: float = 0.0
    """Share of the last half minute or so in which it had requests, as of ``settled_s``."""
    kv_mean_bytes: float = 0.0
    """KV that its requests held on each device in that time, on average."""
    settled_s: float = 0.0
    lately: float = 0.0
    """As ``duty``, of shorter ago; and the mean number of its requests, waiting ones included."""
    requests_lately: float = 0.0
    work: float = 0.0
    """What the fleet counts for it (:mod:`prism.policy.work`), on each of its devices; and ``kv_work_bytes``."""
    kv_work_bytes: float = 0.0
    tenant: tuple[tuple[object, ...], SharingModel] | None = None
    """As its device's tenant, with all the numbers that this follows from (:mod:`.device_times`)."""
    replaces: InstanceKey | None = None
    """The instance that leaves once this one serves (a migration)."""
    live: LiveMode = LiveMode.WHOLE
    """Whether it may serve before its weights are there."""
    carried: bool = False
    """Draining, and told to move its running requests away."""
    waits_for: set[InstanceKey] = field(default_factory=set)
    """Instances whose memory it needs before its command can be sent."""
    model: ModelName = field(init=False)
    devices: tuple[DeviceId, ...] = field(init=False)
    """All devices of all parts, in order."""
    queue_device: DeviceId = field(init=False)
    """The device whose queue takes its requests, and whose reports say how many it has."""

    def __post_init__(self) -> None:
        self.model, self.devices, self.queue_device = self.key.model, devices_of(self.parts), queue_device(self.parts)

    @property
    def busy(self) -> bool:
        return self.running > 0 or self.waiting > 0

    def enter(self, state: InstanceState, now_s: float) -> None:
        self.state, self.since_s = state, now_s

    def settle_lately(self, now_s: float) -> None:
        """It has done since ``settled_s`` what it did at its last report."""
        keep = math.exp((self.settled_s - now_s) / _LATELY_S)
        self.lately = self.lately * keep + (1.0 - keep) * (self.running > 0)
        self.requests_lately = self.requests_lately * keep + (1.0 - keep) * (self.running + self.waiting)


@dataclass(slots=True)
class ModelRecord:
    """One catalog entry with its demand and its instances."""

    spec: ModelSpec
    pinned: bool
    rate: SlidingRate
    idle: IdleIntervals = field(default_factory=IdleIntervals)
    instances: list[InstanceRecord] = field(default_factory=list)
    weighted_rate: float = 0.0
    """``r / s`` as the board has it (:mod:`.rates`)."""
    duty: float = 0.0
    kv_mean_bytes: float = 0.0
    """Both of the instance that was reported last; what a new one is believed to be like."""
    burst: SlidingRate = field(default_factory=lambda: SlidingRate(BURST_WINDOW_S))
    """Arrivals of the last moments."""
    hot: bool = False
    """At most of its instances requests waited for longer than they can bear when they were last reported
    (:mod:`.replica_load`)."""
    last_arrival_s: float | None = None
    idle_since_s: float | None = None
    """When its last instance became idle; kept after that instance left."""
    driven_out_s: float | None = None
    """When it last left for somebody else's memory; None: it is back."""
    made_room: bool = False
    """Its last instance left, idle, for somebody else's memory: it may be loaded again before it is asked. Others were
    to leave: by an operator, by their keep-alive, by a fault."""
    away_expected_s: float = 0.0
    """How long it was expected to stay idle then."""
    idle_trust: float = 1.0
    """How far expectations of its idleness are believed, as of ``trusted_s``
    (:func:`prism.policy.eviction.trust_after`)."""
    trusted_s: float = 0.0
    waiting: int = 0
    waiting_since_s: float = float("inf")
    """When its inactive queue last began to fill: requests that were carried here may have arrived long before."""
    oldest_arrival_s: float = float("inf")
    """Of those that wait."""
    waiting_tokens: int = 0
    tightest_deadline_s: float = float("inf")
    refused_at_s: float = float("-inf")
    """When its waiting requests were refused; minus infinity again once the inactive queue has answered."""
    want: Reason | None = None
    """Why it should be loaded although nothing waits for it (pinned, operator, drain)."""
    wanted_devices: tuple[DeviceId, ...] = ()
    failures: int = 0
    stillborn: int = 0
    """Engines in a row that died by themselves before any request had a token of them."""
    retry_at_s: float = float("-inf")
    failure: str = ""
    failed_for_good: bool = False
    activation_s: float | None = None
    early_s: float | None = None
    """What an instance took lately until it served before its weights were there; None: none did."""
    whole_only: str = ""
    """Why none can, as an engine said."""
    least_instances: int = 1
    """So many an operator asked for: they stay although demand does not need them (neighbours' demand may)."""
    avoid_until_s: dict[DeviceId, float] = field(default_factory=dict)
    short_bytes: dict[DeviceId, int] = field(default_factory=dict)
    """How much more than its size it is believed to need on a device whose memory turned out not to be there."""
    removed: bool = False

    @property
    def name(self) -> ModelName:
        return self.spec.name

    def in_state(self, state: InstanceState, or_in: InstanceState | None = None) -> list[InstanceRecord]:
        return [i for i in self.instances if i.state is state or i.state is or_in]

    @property
    def coming_or_here(self) -> bool:
        """Some instance serves or will."""
        return any(i.state is not InstanceState.DRAINING for i in self.instances)

    def is_spare(self, instance: InstanceRecord) -> bool:
        """Whether the model serves on without this instance: it has an older one that serves. The oldest is its home,
        which leaves as that of any other model does."""
        if len(self.instances) < 2:
            return False
        serving, generation, has_older = 0, instance.key.generation, False
        for other in self.instances:
            if other.state is InstanceState.READY:
                serving, has_older = serving + 1, has_older or other.key.generation < generation
        return serving > 1 and has_older

    @property
    def resting_since_s(self) -> float | None:
        """Since when none of its active instances has had a request; None when one has."""
        latest_s: float | None = None
        for instance in self.instances:
            if instance.state is InstanceState.READY:
                if instance.idle_since_s is None:
                    return None
                latest_s = instance.idle_since_s if latest_s is None else max(latest_s, instance.idle_since_s)
        return latest_s

    @property
    def starves_at_s(self) -> float:
        """From then on models in use leave for it; infinite when nothing waits."""
        return self.waiting_since_s + self.spec.max_wait_s / 2 if self.waiting else float("inf")

    def clear_failure(self) -> None:
        self.failures, self.retry_at_s, self.failure, self.failed_for_good = 0, float("-inf"), "", False
        self.avoid_until_s.clear()


@dataclass(slots=True)
class PrewarmCounts:
    """What loading models before they are asked was good for, since the scheduler began."""

    used: int = 0
    """Instances that had a request before they left."""
    wasted: int = 0
    """Instances that left without one."""
    saved_s: float = 0.0
    """Activations that requests did not wait for, as long as they were expected to take."""


_REMEMBERED_S = 5.0
"""Time constant of a device's share of time with waiting requests."""
_PEAK_REMEMBERED_S = 60.0
"""Time constant with which a peak of KV memory in use is forgotten."""


@dataclass(slots=True)
class DeviceRecord:
    """One device in service, as it was last reported, with what is placed on it."""

    spec: DeviceSpec
    draining: bool = False
    carries: bool = False
    """Draining, and what runs there moves away with its tokens."""
    free_bytes: int | None = None
    busy_kv_bytes: int = 0
    """Mapped KV of running requests, from the last report."""
    waiting_share: float = 0.0
    """Share of the recent time in which requests waited in the device's queue, or in an engine without any memory."""
    stalled: bool = False
    """Requests are here and nothing runs, or what runs has no KV memory at all."""
    memory_short_s: float = 0.0
    """How long requests had been waiting for memory at the last report."""
    reported_s: float = 0.0
    load_mean: float = 0.0
    load_now: float = 0.0
    """Both as of ``reported_s``: :meth:`prism.scheduler.fleet.Fleet.load_of`."""
    kv_peak_bytes: float = 0.0
    """Highest ``busy_kv_bytes`` of the last minute or so, fading."""
    contested_s: float = float("-inf")
    """When somebody last had to leave for another's memory here, or requests waited for memory."""
    instances: dict[InstanceKey, InstanceRecord] = field(default_factory=dict)
    """By key: two generations of one model may stand here for a moment."""
    busy_kv: dict[InstanceKey, int] = field(default_factory=dict)
    """``busy_kv_bytes`` by instance."""

    @property
    def expects_somebody(self) -> bool:
        """An instance waits for its memory here, or is being loaded: what it will need is not known yet."""
        coming = InstanceState.WAITING, InstanceState.LOADING
        return any(i.state in coming for i in self.instances.values())

    def take_report(self, report: DeviceReport, now_s: float) -> None:
        self.free_bytes = report.free_bytes
        busy_kv: dict[InstanceKey, int] = {}
        waits = runs = False
        for load in report.instances:
            busy_kv[load.key] = load.kv_bytes - load.kv_idle_bytes
            waits, runs = waits or load.waiting > 0, runs or load.running > 0
        self.busy_kv, self.busy_kv_bytes = busy_kv, sum(busy_kv.values())
        self.stalled = self.busy_kv_bytes == 0 if runs else waits
        waits = waits or self.stalled
        self.memory_short_s = report.memory_short_s
        if report.memory_short_s > 0.0:
            self.contested_s = now_s
        past_s = now_s - self.reported_s
        keep = _REMEMBERED_S / (_REMEMBERED_S + past_s)
        self.waiting_share = self.waiting_share * keep + (1.0 - keep) * waits
        fading = self.kv_peak_bytes * _PEAK_REMEMBERED_S / (_PEAK_REMEMBERED_S + past_s)
        self.kv_peak_bytes = max(float(self.busy_kv_bytes), fading)
        self.reported_s = now_s
