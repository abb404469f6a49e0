"""What a machine gives: devices and their links, engines, memory for weights, and for KV outside of engines."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from prism.config.sections.base import Fraction, Section
from prism.config.units import Bytes, Seconds
from prism.core.ids import kind_and_index
from prism.core.pace import DevicePace
from prism.core.settings import LongPromptPlace

DEVICE_PATTERN = r"^(cuda|host):(0|[1-9][0-9]{0,3})$"


class LinkConfig(Section, frozen=True, kw_only=True):
    """Rates of a virtual device's links, per second: copies of KV keep to them, and of weights (`load_helpers`)."""

    host_bytes_s: Annotated[Bytes, Meta(description="To host memory, per second; 0: as fast as it goes.")] = field(
        name="host", default_factory=lambda: Bytes(0)
    )
    peer_bytes_s: Annotated[Bytes, Meta(description="To another device, per second; 0: as fast as it goes.")] = field(
        name="peer", default_factory=lambda: Bytes(0)
    )
    memory_bytes_s: Annotated[
        Bytes,
        Meta(
            description="Of the device's own memory, per second, of which `kv.lend_rate_fraction` is a share; 0: it is "
            "not known, and who borrows is not held back."
        ),
    ] = field(name="memory", default_factory=lambda: Bytes(0))


class PaceConfig(Section, frozen=True, kw_only=True):
    """The compute speed that a virtual device plays: what one layer of a model takes on it, at least."""

    layer_s: Annotated[Seconds, Meta(description="In every step, for reading its weights.")] = field(
        name="layer", default_factory=lambda: Seconds(0.0)
    )
    prefill_token_s: Annotated[Seconds, Meta(description="More, for each token of a prefill.")] = field(
        name="prefill_token", default_factory=lambda: Seconds(0.0)
    )
    decode_sequence_s: Annotated[Seconds, Meta(description="More, for each sequence that decodes.")] = field(
        name="decode_sequence", default_factory=lambda: Seconds(0.0)
    )
    decode_kv_token_s: Annotated[Seconds, Meta(description="More, for each token of KV that those read.")] = field(
        name="decode_kv_token", default_factory=lambda: Seconds(0.0)
    )

    def declared(self) -> DevicePace:
        return DevicePace(
            layer_s=float(self.layer_s),
            prefill_token_s=float(self.prefill_token_s),
            decode_sequence_s=float(self.decode_sequence_s),
            decode_kv_token_s=float(self.decode_kv_token_s),
        )


class DeviceConfig(Section, frozen=True, kw_only=True):
    """One device: a GPU (`cuda:N`) or host memory with a hard cap that stands in for one (`host:N`)."""

    id: Annotated[str, Meta(pattern=DEVICE_PATTERN, description="`cuda:N` or `host:N`.")]
    memory_bytes: Annotated[
        Bytes | None,
        Meta(
            description="What Prism may use of it: weights, KV and, on a GPU, what engines take beside them. Required "
            "for `host:N`; for `cuda:N` the default is `gpu_memory_fraction` of the GPU's memory."
        ),
    ] = field(name="memory", default=None)
    domain: Annotated[
        str, Meta(description="Devices with the same domain share a fast interconnect (NVLink); empty: the machine.")
    ] = ""
    links: Annotated[LinkConfig, Meta(description="What its links reach, for `host:N` that play a GPU's.")] = field(
        default_factory=LinkConfig
    )
    pace: Annotated[
        PaceConfig | None,
        Meta(
            description="The compute speed that `host:N` plays; its engines sleep for the rest of the time. Default: "
            "it computes as fast as it can."
        ),
    ] = None

    @property
    def kind(self) -> str:
        return kind_and_index(self.id)[0]

    @property
    def index(self) -> int:
        return kind_and_index(self.id)[1]


class VirtualDevices(Section, frozen=True, kw_only=True):
    """The devices that `devices: auto` makes on a machine without a GPU."""

    count: Annotated[int, Meta(ge=1, le=64, description="How many virtual devices.")] = 2
    memory_bytes: Annotated[Bytes, Meta(description="Hard cap of each: weights and KV together.")] = field(
        name="memory", default_factory=lambda: Bytes(1 << 30)
    )


class EngineConfig(Section, frozen=True, kw_only=True):
    """The pool of pre-warmed SGLang workers on each device."""

    parked_per_device: Annotated[
        int, Meta(ge=0, le=64, description="Workers without a model kept ready; each activation takes one.")
    ] = 1
    max_per_device: Annotated[
        int, Meta(ge=1, le=256, description="Workers at most, so models at most; idle ones make room.")
    ] = 8
    start_timeout_s: Annotated[Seconds, Meta(description="A worker that is not ready by then is replaced.")] = field(
        name="start_timeout", default_factory=lambda: Seconds(180.0)
    )
    threads: Annotated[int, Meta(ge=1, le=256, description="Compute threads of a worker on a virtual device.")] = 1
    parked_bytes: Annotated[
        Bytes,
        Meta(description="What a worker without a model is taken to hold of a GPU, until it is found to hold more."),
    ] = field(name="parked_memory", default_factory=lambda: Bytes(512 << 20))
    active_bytes: Annotated[
        Bytes,
        Meta(
            description="What an engine may take of a GPU beside weights and KV: the driver's context, torch, graphs, "
            "workspaces. Set aside for each model that is active; torch is held to it."
        ),
    ] = field(name="active_memory", default_factory=lambda: Bytes(2 << 30))
    kept_models: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Recently used models that a worker keeps built, without weights and KV, so that they come "
            "back in a fraction of the time. Each keeps its graphs and tables in memory.",
        ),
    ] = 2
    load_helpers: Annotated[
        int,
        Meta(
            ge=0,
            le=7,
            description="Other devices of the machine whose links to host memory a device may load weights over, where "
            "NVLink joins them (virtual devices: where declared links say so). 0: each loads over its own.",
        ),
    ] = 3
    overlap: Annotated[
        bool | None,
        Meta(
            description="Prepare a step while the device computes the one before. Default: on GPUs, where it hides the "
            "scheduler's time; a virtual device has nothing to hide it behind."
        ),
    ] = None
    standby: Annotated[
        bool,
        Meta(
            description="Keep a second warm process from which workers are forked: when the first is killed, the "
            "machine is back in seconds instead of the up to minutes that importing SGLang takes. Most of its memory "
            "is shared (docs/runbook.md)."
        ),
    ] = True


class WeightConfig(Section, frozen=True, kw_only=True):
    """Packed weights on every machine of the fleet; the least recently used make room."""

    host_memory_fraction: Annotated[
        Fraction, Meta(description="Share of a machine's memory for weights ready to be loaded, one copy per model.")
    ] = 0.5
    parameter_pool: Annotated[
        bool,
        Meta(
            description="In a fleet of several machines every packed model keeps a copy in some machine's host memory."
        ),
    ] = True
    disk_bytes: Annotated[
        Bytes | None, Meta(description="Disk for packed weights. Default: as much as the file system has.")
    ] = field(name="disk", default=None)


class KvConfig(Section, frozen=True, kw_only=True):
    """KV outside of engines: of models that left, of requests that were taken out of a batch, of evicted prefixes."""

    keep: Annotated[
        bool,
        Meta(
            description="Keep it in host memory where bringing it back takes less than computing it again: a "
            "conversation goes on from its cache after its model was evicted or moved. Off: it is computed again."
        ),
    ] = True
    host_memory_fraction: Annotated[
        Fraction,
        Meta(
            description="Share of a machine's memory for it, one pool for all models; less where others need the "
            "memory. It is taken when there is something to keep."
        ),
    ] = 0.1
    leave_s: Annotated[
        Seconds,
        Meta(
            description="Most time that a model which leaves its device takes to store what it has cached, what was "
            "used last first; the rest is computed again."
        ),
    ] = field(name="leave", default_factory=lambda: Seconds(1.0))
    lend: Annotated[
        bool,
        Meta(
            description="Devices lend free memory to engines of other devices of the machine whose link to them is "
            "faster than to host memory (`links`). It is the first to go when somebody needs it."
        ),
    ] = False
    lend_keep_fraction: Annotated[
        Fraction, Meta(description="Share of a device's memory that it keeps free and never lends.")
    ] = 0.1
    lend_rate_fraction: Annotated[
        Fraction,
        Meta(
            description="Share of its memory's bandwidth that all who borrow from a device may take together, so that "
            "its own steps lose no more. 0.05: at most a twentieth of their time."
        ),
    ] = 0.05
    long_prompts: Annotated[
        LongPromptPlace,
        Meta(
            description="Where prompts whose KV is larger than their device may have it: nowhere, they are refused "
            "(refuse), in host memory (host, needs `keep`), or also in what other devices lend (lent, needs `lend`)."
            " `host_memory_fraction` bounds it; each token then reads all of it over the link."
        ),
    ] = LongPromptPlace.REFUSE
