"""A catalog file as a whole: the root of the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from prism.config.sections.base import Fraction, Section
from prism.config.sections.live import LiveScalingConfig
from prism.config.sections.machine import (
    DEVICE_PATTERN,
    DeviceConfig,
    EngineConfig,
    KvConfig,
    VirtualDevices,
    WeightConfig,
)
from prism.config.sections.model import ModelConfig, ModelOptions
from prism.config.sections.policy import PolicyConfig
from prism.config.sections.server import KeyConfig, LogConfig, ServerConfig
from prism.config.sections.topology import TopologyConfig


class CatalogFile(Section, frozen=True, kw_only=True):
    """A Prism catalog: devices, models, policy, server, keys."""

    models: Annotated[tuple[ModelConfig, ...], Meta(description="The models served; hundreds cost nothing until used.")]
    defaults: Annotated[ModelOptions, Meta(description="Options of every model that does not set them itself.")] = (
        field(default_factory=ModelOptions)
    )
    devices: Annotated[
        Literal["auto"] | tuple[Annotated[str, Meta(pattern=DEVICE_PATTERN)] | DeviceConfig, ...],
        Meta(description="`auto` (all GPUs, or the virtual devices below), or a list of devices."),
    ] = "auto"
    virtual: Annotated[VirtualDevices, Meta(description="What `auto` makes without a GPU.")] = field(
        default_factory=VirtualDevices
    )
    gpu_memory_fraction: Annotated[
        Fraction,
        Meta(
            description="Share of a GPU's memory Prism may use when its device gives no `memory`, everything counted."
        ),
    ] = 0.95
    policy: Annotated[PolicyConfig, Meta(description="Who runs where and when.")] = field(default_factory=PolicyConfig)
    engines: Annotated[EngineConfig, Meta(description="The pool of pre-warmed engines.")] = field(
        default_factory=EngineConfig
    )
    weights: Annotated[WeightConfig, Meta(description="Packed weights in host memory and on disk.")] = field(
        default_factory=WeightConfig
    )
    kv: Annotated[KvConfig, Meta(description="KV outside of engines.")] = field(default_factory=KvConfig)
    live_scaling: Annotated[LiveScalingConfig, Meta(description="Serving while weights arrive.")] = field(
        default_factory=LiveScalingConfig
    )
    topology: Annotated[TopologyConfig, Meta(description="What joins the machines of a fleet.")] = field(
        default_factory=TopologyConfig
    )
    server: Annotated[ServerConfig, Meta(description="The HTTP front door.")] = field(default_factory=ServerConfig)
    log: Annotated[LogConfig, Meta(description="Logs.")] = field(default_factory=LogConfig)
    keys: Annotated[tuple[KeyConfig, ...], Meta(description="API keys.")] = ()
