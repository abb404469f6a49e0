"""The policy settings of a catalog, with their defaults: one object for live system, simulator and tests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prism.core.errors import InvalidValue


class PolicyName(StrEnum):
    PRISM = "prism"
    STATIC = "static"
    MUXSERVE = "muxserve"
    QLM = "qlm"
    SERVERLESSLLM = "serverlessllm"

    @property
    def has_fixed_map(self) -> bool:
        """Models stay where they were loaded at the start."""
        return self in (PolicyName.STATIC, PolicyName.MUXSERVE)


class LiveMode(StrEnum):
    """When a further instance of a model begins to serve. (No ``off``: that is a boolean in YAML.)"""

    WHOLE = "whole"
    """When all of its weights are there."""
    PAIR = "pair"
    """It leads requests as soon as it has embedding and head; an instance that has everything runs the layers that are
    still to come."""
    PIPELINES = "pipelines"
    """As for a pair; and as soon as instances that come together, on whichever machines, have all layers between them
    they run them for each other (an execution pipeline, lambda-Scale 4.3)."""
    AUTO = "auto"
    """In a setting only: whichever is estimated to serve most requests within their objective
    (:mod:`prism.policy.live.choice`)."""


class KvprMode(StrEnum):
    """Which pressure Algorithm 1 compares."""

    PAPER = "paper"
    """Before the model is added, as printed."""
    LOOKAHEAD = "lookahead"
    """After it is added, as its proof needs."""


class Placement(StrEnum):
    """What a place for a model is chosen by, and a move."""

    KVPR = "kvpr"
    """KV pressure by request rates (Prism, Algorithm 1)."""
    GOODPUT = "goodput"
    """How many requests meet their objectives by what models take of bandwidth and KV memory, as it is learned
    (:mod:`prism.policy.goodput`)."""


class Admission(StrEnum):
    """In which order a device hands requests to its engines."""

    MOORE_HODGSON = "moore_hodgson"
    FCFS = "fcfs"
    """First come, first served over all models of the device, still only what can start at once (ablation)."""
    GREEDY = "greedy"
    """At once; every engine keeps its own queue (rival policies)."""


class LongPromptPlace(StrEnum):
    """Where prompts whose KV is larger than their device may have it."""

    REFUSE = "refuse"
    """Nowhere."""
    HOST = "host"
    LENT = "lent"
    """In memory that other devices lend, and in host memory."""


class EvictionOrder(StrEnum):
    PAPER = "paper"
    """Idle beyond the threshold, larger SLO first, then longer idle."""
    EXPECTED_IDLE = "expected_idle"
    """Least expected cost of having to bring the model back, by its own idle-interval distribution."""


class Overload(StrEnum):
    """Who is served where not everybody can be."""

    EVERYBODY = "everybody"
    """Everybody alike, by deadline."""
    TURNS = "turns"
    """Where memory cannot hold all that are asked, the models of which it serves the most requests; each of the others
    has its turn when its requests have waited for nearly their bound."""
    MOST_SERVED = "most_served"
    """The same, also where time alone is short, and with a tenth of the fleet's time for all turns together."""


class MigrationTest(StrEnum):
    """When a move that Algorithm 1 asks for is made."""

    PAPER = "paper"
    """Always: ``tau`` is the only threshold."""
    COST_AWARE = "cost_aware"
    """Only away from a device that is short of memory or time, only for a model in use, and only if the move gains more
    within the planning window than the activation costs."""


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Of the scheduler of one device."""

    admission: Admission = Admission.MOORE_HODGSON
    max_queued: int = 20_000
    """More waiting requests than this on one device are refused."""
    overdue_share: float = 0.25
    """Share of the prefill time that requests beyond their starvation bound get while others can still be on time (all
    of it otherwise). If they took all, an overload that lasts longer than the bound would make everything late."""
    decode_reserve_tokens: int = 64
    """KV kept free for each running request to grow into before a new prompt may start; half of the longest answer that
    it may have, if that is less."""
    longest_pause_s: float = 0.3
    """An engine may make no decode step for this long so that its neighbours keep their time per token
    (:mod:`prism.policy.pauses`); 0: never."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Of the global scheduler."""

    policy: PolicyName = PolicyName.PRISM
    placement: Placement = Placement.GOODPUT
    kvpr: KvprMode = KvprMode.LOOKAHEAD
    tau: float = 0.1
    """Migration threshold: a device must be better by this share of the mean pressure of the cluster (so that the
    number means the same for devices of any size)."""
    rate_window_s: float = 60.0
    """Sliding window of request rates."""
    planning_window_s: float = 60.0
    """A move must gain more service within this time than it costs."""
    migration: MigrationTest = MigrationTest.COST_AWARE
    pressed_kv_share: float = 0.5
    """A device whose running requests occupy more than this share of the memory beside its weights is short of it."""
    min_kv_tokens: int = 2048
    """Tokens (at most the context) that must find room beside a model's weights, if its ``min_kv_bytes`` is less."""
    max_replicas: int = 8
    """Most instances of one model; further ones come when requests wait too long for the model or run too slowly, where
    there is free room or, for those that would be late, where idle models have it."""
    standing_replicas: bool = True
    """A model keeps as many instances as its bursts have needed, where memory is free; they leave first."""
    overload: Overload = Overload.TURNS
    prewarm: bool = True
    """A model that made room for others is loaded shortly before it is expected to be asked again."""
    exchanges: bool = False
    """Two models also change places where neither device has room for both: one leaves first and is loaded when the
    other has moved (:mod:`prism.policy.relief`)."""
    rebalance_every_s: float = 5.0
    """Algorithm 1 runs over the loaded models at most this often; 0: never."""
    eviction: EvictionOrder = EvictionOrder.EXPECTED_IDLE
    idle_threshold_s: float | None = None
    """Idle time before eviction; None: from the idle-interval distribution."""
    activation_guess_s: float = 1.0
    """Expected activation time of a model that was never activated."""
    min_residency_s: float = 2.0
    """A model in use is not driven out for a starving one before it was active this long (and has served)."""
    failure_backoff_s: float = 1.0
    """Pause after the first failed activation; doubles up to ``failure_backoff_max_s``."""
    failure_backoff_max_s: float = 60.0
    activation_attempts: int = 3
    """Failed activations in a row after which waiting requests are refused."""
    max_waiting: int = 20_000
    """More requests than this waiting for one inactive model are refused."""
    expected_rates: tuple[tuple[str, float], ...] = ()
    """Requests/s by model. ``muxserve`` and ``static`` make their fixed map for them (a model that is not named is
    asked nothing, unless none is); ``prism`` counts them until it has seen one ``rate_window_s`` of requests."""
    expected_prompt_tokens: tuple[tuple[str, float], ...] = ()
    """Mean prompt of each model, for fixed maps."""
    expected_output_tokens: tuple[tuple[str, float], ...] = ()
    """Mean answer of each model, for fixed maps."""
    concurrency_target: int = 16
    """``serverlessllm``: requests for which one instance is wanted."""
    live: LiveMode = LiveMode.AUTO
    """When further instances begin to serve: the catalog's ``live_scaling.mode``."""
    live_hop_s: float = 0.0005
    """What it takes to ask an engine of another machine and to have the beginning of its answer: the catalog's
    ``live_scaling.hop``."""
    # Switches for ablations.
    global_scheduler: bool = True
    """False: a model goes to the next device in turn where it fits, and never moves."""
    elastic_memory: bool = True
    """False: every instance gets a fixed KV share at activation."""
    engine_pool: bool = True
    """False: an activation starts an engine process (the node agent does it)."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The ``policy:`` section of a catalog."""

    cluster: ClusterSettings = ClusterSettings()
    gpu: GpuSettings = GpuSettings()

    @staticmethod
    def named(name: str) -> PolicySettings:
        """The settings of a policy as its paper has it: rivals use greedy engines that never stand still,
        ``static`` fixed shares."""
        if name not in [p.value for p in PolicyName]:
            raise InvalidValue("policy", name, "unknown policy", choices=[p.value for p in PolicyName])
        policy = PolicyName(name)
        if policy is PolicyName.PRISM:
            return PolicySettings()
        elastic = policy is not PolicyName.STATIC
        replicas = 10 if policy is PolicyName.SERVERLESSLLM else 1
        return PolicySettings(
            ClusterSettings(policy=policy, elastic_memory=elastic, rebalance_every_s=0.0, max_replicas=replicas),
            GpuSettings(admission=Admission.GREEDY, longest_pause_s=0.0),
        )
