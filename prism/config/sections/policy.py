"""The `policy` section. Its keys mirror :class:`prism.core.settings.PolicySettings`, where the defaults live.

A key that is not written takes the value of the named policy's preset, so that `name: static` alone is the rival as its
paper has it; the schema shows the values of `prism`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, TypeVar

from msgspec import UNSET, Meta, UnsetType

from prism.config.sections.base import Section
from prism.config.units import Seconds
from prism.core.settings import (
    Admission,
    ClusterSettings,
    EvictionOrder,
    GpuSettings,
    KvprMode,
    MigrationTest,
    Overload,
    Placement,
    PolicyName,
    PolicySettings,
)

_Settings = TypeVar("_Settings", ClusterSettings, GpuSettings)

Switch = bool | UnsetType
Count = Annotated[int, Meta(ge=1)] | UnsetType
Duration = Seconds | UnsetType


class PolicyConfig(Section, frozen=True, kw_only=True):
    """Who runs where and when."""

    name: Annotated[PolicyName, Meta(description="`prism`, or a rival it is compared with, over the same engines.")] = (
        PolicyName.PRISM
    )
    placement: Annotated[
        Placement | UnsetType,
        Meta(description="Places and moves by expected objectives met (goodput), or by KV pressure (kvpr)."),
    ] = UNSET
    kvpr: Annotated[
        KvprMode | UnsetType,
        Meta(description="Compare devices before the model is added to each (paper) or with it (lookahead)."),
    ] = UNSET
    tau: Annotated[
        Annotated[float, Meta(ge=0.0)] | UnsetType,
        Meta(description="A model moves only to a device that is better by this share of the mean pressure."),
    ] = UNSET
    rate_window: Annotated[Duration, Meta(description="Sliding window over which request rates are counted.")] = UNSET
    planning_window: Annotated[
        Duration, Meta(description="Time within which a move must gain more service than it costs.")
    ] = UNSET
    migration: Annotated[
        MigrationTest | UnsetType,
        Meta(description="When a model may move: when the paper says so, or only when that also relieves and pays."),
    ] = UNSET
    pressed_kv_share: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType,
        Meta(description="A device whose running requests hold more than this share of its KV memory is short of it."),
    ] = UNSET
    min_kv_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | UnsetType,
        Meta(description="Tokens (at most the context) that must find room beside a model's weights."),
    ] = UNSET
    max_replicas: Annotated[
        Annotated[int, Meta(ge=1)] | UnsetType,
        Meta(
            description="Most instances of one model; further ones come when its load needs them, into free room or, "
            "for requests that would be late, in idle models' place."
        ),
    ] = UNSET
    standing_replicas: Annotated[
        Switch,
        Meta(description="Models keep the instances that bursts needed, where memory is free; they leave first."),
    ] = UNSET
    overload: Annotated[
        Overload | UnsetType,
        Meta(
            description="Who is served where not everybody can be. `everybody`: all alike. `turns`: where memory "
            "cannot hold all that are asked, those of whom it serves the most requests, and each of the others in "
            "turns, when nine tenths of its `max_wait` are over. `most_served`: also where time is short, with a tenth "
            "of it for all turns; what waits beyond `max_wait` is refused."
        ),
    ] = UNSET
    prewarm: Annotated[
        Switch,
        Meta(
            description="Models that made room for others are loaded shortly before they are expected to be asked "
            "again, into free memory or in the place of idle models that are expected much later."
        ),
    ] = UNSET
    exchanges: Annotated[
        Switch,
        Meta(
            description="Two busy models also change places where no device has room for both; one of them is away "
            "for some seconds."
        ),
    ] = UNSET
    rebalance_every: Annotated[
        Duration, Meta(description="How often the placement of loaded models is reconsidered; 0: never.")
    ] = UNSET
    eviction: Annotated[
        EvictionOrder | UnsetType,
        Meta(description="Who leaves first: as in the paper, or least expected cost of having to come back."),
    ] = UNSET
    idle_threshold: Annotated[
        Duration, Meta(description="Idle time before eviction. Default: learned from each model's idle intervals.")
    ] = UNSET
    activation_guess: Annotated[
        Duration, Meta(description="Expected activation time of a model that was never activated.")
    ] = UNSET
    min_residency: Annotated[
        Duration, Meta(description="A model in use is not driven out before it was active this long and has served.")
    ] = UNSET
    failure_backoff: Annotated[
        Duration, Meta(description="Pause after the first failed activation; it doubles up to `failure_backoff_max`.")
    ] = UNSET
    failure_backoff_max: Annotated[Duration, Meta(description="Longest pause after failed activations.")] = UNSET
    activation_attempts: Annotated[
        Count, Meta(description="Failed activations in a row after which waiting requests are refused.")
    ] = UNSET
    max_waiting: Annotated[
        Count, Meta(description="Requests waiting for one inactive model over which more are refused.")
    ] = UNSET
    max_queued: Annotated[Count, Meta(description="Requests waiting on a device over which more are refused.")] = UNSET
    overdue_share: Annotated[
        Annotated[float, Meta(gt=0.0, lt=1.0)] | UnsetType,
        Meta(description="Prefill time for requests beyond their `max_wait` while others can still be on time."),
    ] = UNSET
    decode_reserve_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | UnsetType,
        Meta(
            description="KV tokens kept free for each running request before a new prompt may start; half of the "
            "longest answer that it may have, if that is less."
        ),
    ] = UNSET
    longest_pause: Annotated[
        Duration,
        Meta(
            description="How long an engine may make no decode step so that its neighbours keep their time per token; "
            "0: never."
        ),
    ] = UNSET
    expected_rates: Annotated[
        dict[str, Annotated[float, Meta(ge=0.0)]] | UnsetType,
        Meta(
            description="Requests per second by model: for the fixed maps of `muxserve` and `static` (others count as "
            "nothing, unless none is named), and for `prism` until it has seen one `rate_window`."
        ),
    ] = UNSET
    expected_prompt_tokens: Annotated[
        dict[str, Annotated[float, Meta(ge=1.0)]] | UnsetType,
        Meta(description="Mean prompt by model, for the fixed maps of `muxserve` and `static` (others count as 512)."),
    ] = UNSET
    expected_output_tokens: Annotated[
        dict[str, Annotated[float, Meta(ge=1.0)]] | UnsetType,
        Meta(description="Mean answer by model, for the fixed maps of `muxserve` and `static` (others count as 128)."),
    ] = UNSET
    concurrency_target: Annotated[
        Count, Meta(description="`serverlessllm`: requests of a model for which one instance is wanted.")
    ] = UNSET
    admission: Annotated[
        Admission | UnsetType, Meta(description="Order in which a device hands its requests to its engines.")
    ] = UNSET
    global_scheduler: Annotated[
        Switch, Meta(description="Off (ablation): models go to devices in turn and never move.")
    ] = UNSET
    elastic_memory: Annotated[
        Switch, Meta(description="Off (ablation): each model gets a fixed KV share when it is loaded.")
    ] = UNSET
    engine_pool: Annotated[
        Switch,
        Meta(description="Off (ablation): each activation starts an engine process, instead of taking a parked one."),
    ] = UNSET

    def settings(self) -> PolicySettings:
        """The schedulers' settings: the named policy's preset with the keys that are written."""
        preset = PolicySettings.named(self.name)
        return PolicySettings(cluster=self._over(preset.cluster), gpu=self._over(preset.gpu))

    def _over(self, preset: _Settings) -> _Settings:
        written = {info.name: getattr(self, catalog_key(info.name), UNSET) for info in fields(preset)}
        return replace(preset, **{name: _plain(value) for name, value in written.items() if value is not UNSET})


def catalog_key(setting: str) -> str:
    """The catalog's key for a field of the settings: without its unit, which the value carries."""
    return setting.removesuffix("_s")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return float(value) if isinstance(value, Seconds) else value
