"""The sections of a catalog as frozen objects. One definition gives parser, checks, JSON schema and defaults.

Attribute names carry units (``ttft_s``, ``min_kv_bytes``); the keys people write (``ttft``, ``min_kv_memory``) do not,
because the values do: ``500ms``, ``64MiB``. Every key has a description, which the schema shows in editors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from prism.config.section import Section
from prism.config.units import Bytes, Seconds
from prism.core.ids import kind_and_index
from prism.core.settings import LongPromptPlace
from prism.core.specs import LatePolicy, LendingRole, ModelKind, Prefer, Scheduling, SpeculativeAlgorithm

MODEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}$"
DEVICE_PATTERN = r"^(cuda|host):(0|[1-9][0-9]{0,3})$"

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Name = Annotated[str, Meta(pattern=MODEL_NAME_PATTERN, description="Name in the `model` field of a request.")]
LoraModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Layers that can have an adapter, by their names in checkpoints."""


class Slo(Section, frozen=True, kw_only=True):
    """Latency objectives of a model."""

    ttft_s: Annotated[
        Seconds,
        Meta(description="Time to first token a request should meet; without tokens (vectors, scores): to its answer."),
    ] = field(name="ttft", default_factory=lambda: Seconds(2.0))
    tpot_s: Annotated[Seconds, Meta(description="Mean time per further output token a request should meet.")] = field(
        name="tpot", default_factory=lambda: Seconds(0.2)
    )


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


class ModelOptions(Section, frozen=True, kw_only=True):
    """What `defaults` may hold: every option of a model except its name, path and aliases."""

    slo: Annotated[Slo, Meta(description="Latency objectives; requests are ordered by them.")] = field(
        default_factory=Slo
    )
    tp: Annotated[
        int, Meta(ge=1, le=64, description="Tensor-parallel size: on how many devices one copy is spread.")
    ] = 1
    context_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Longest prompt plus answer, in tokens. Default: what the model's config.json says."),
    ] = field(name="context_length", default=None)
    pinned: Annotated[bool, Meta(description="Loaded at start and never evicted.")] = field(name="pin", default=False)
    keep_alive_s: Annotated[
        Seconds | None,
        Meta(
            description="Idle time after which it leaves although nobody needs the memory. Default: only when needed."
        ),
    ] = field(name="keep_alive", default=None)
    min_kv_bytes: Annotated[
        Bytes, Meta(description="KV memory that must stay free beside its weights on a device it is placed on.")
    ] = field(name="min_kv_memory", default_factory=lambda: Bytes(0))
    late: Annotated[
        LatePolicy,
        Meta(description="A request too late for its TTFT runs after the others (serve) or gets 429 (reject)."),
    ] = LatePolicy.SERVE
    prefer: Annotated[
        Prefer,
        Meta(
            description="What its requests are admitted by where not all can have both: their first token (ttft), a "
            "steady stream (tpot), or both or nothing."
        ),
    ] = Prefer.BOTH
    scheduling: Annotated[
        Scheduling,
        Meta(
            description="Requests are handed to the engine when they can start and stay until they end (deadline), or "
            "take turns in it, least served first, with the KV of the others kept outside (fair; needs `kv.keep`)."
        ),
    ] = Scheduling.DEADLINE
    lending: Annotated[
        LendingRole,
        Meta(
            description="Where `kv.lend` is on: devices it is on lend what it leaves free (lend), its own KV may go to "
            "other devices (borrow), both, or neither (none)."
        ),
    ] = LendingRole.BOTH
    max_wait_s: Annotated[
        Seconds, Meta(description="Starvation bound: after this wait a request goes ahead of every deadline.")
    ] = field(name="max_wait", default_factory=lambda: Seconds(60.0))
    max_queue: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Waiting requests of this model over which 429 is answered. Default: only `server.max_queue`."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(description="SGLang's parser that separates reasoning from the answer (`qwen3`, `deepseek-r1`, ...)."),
    ] = None
    tool_call_parser: Annotated[
        str | None, Meta(description="SGLang's parser for tool calls (`qwen25`, `llama3`, `mistral`, ...).")
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="Chat template: a file, or the name of one of SGLang's. Default: the model's own.")
    ] = None
    engine_args: Annotated[
        dict[str, Any], Meta(description="Passed to the SGLang engine as they are (names of its ServerArgs fields).")
    ] = field(default_factory=dict)


class LoraConfig(Section, frozen=True, kw_only=True):
    """Room for LoRA adapters on the engines of a model. It is kept as soon as the catalog has adapters of the model, or
    this section."""

    slots: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Adapters in device memory at a time, and different ones in one step; the least recently used "
            "makes room for the next.",
        ),
    ] = 8
    max_rank: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Largest rank an adapter may have. Default: the largest of the catalog's adapters."),
    ] = None
    target_modules: Annotated[
        tuple[LoraModule, ...] | None,
        Meta(description="Layers adapters may change. Default: those that the catalog's adapters change."),
    ] = None


class SpeculativeConfig(Section, frozen=True, kw_only=True):
    """Speculative decoding: tokens are guessed, and the model checks several in one step. Answers stay as they are; a
    step computes more."""

    algorithm: Annotated[
        SpeculativeAlgorithm,
        Meta(
            description="Who guesses: `ngram`, what followed the last tokens before, in the engine's answers so far; "
            "`eagle` or `eagle3`, the small model `draft`, which was made for this one."
        ),
    ]
    draft: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="The model that guesses: a folder (relative to the catalog's), or a Hugging Face id. Required "
            "for `eagle` and `eagle3`. Its weights and KV lie beside the model's own."
        ),
    ] = None
    steps: Annotated[
        int, Meta(ge=1, le=16, description="Tokens that `draft` guesses one behind the other, before a step.")
    ] = 5
    branches: Annotated[
        int,
        Meta(ge=1, le=16, description="Guesses that it goes on from in each of these; 1: a chain."),
    ] = 4
    draft_tokens: Annotated[
        int,
        Meta(
            ge=2,
            le=64,
            description="Tokens that one step checks for each request, its last one with them. KV of twice as many is "
            "kept free for each.",
        ),
    ] = 8
    ngrams: Annotated[
        int,
        Meta(
            ge=1024,
            le=100_000_000,
            description="Nodes of an engine's table of what followed what, 200 to 300 bytes of host memory each; the "
            "least recently used make room.",
        ),
    ] = 1 << 18


class ModelConfig(ModelOptions, frozen=True, kw_only=True):
    """One model of the catalog, or with `base` and `adapter` a LoRA adapter over one. An adapter shares the engines and
    weights of its base; of its own it has a name, aliases and objectives (`slo`, `late`, `max_wait`; default: its
    base's)."""

    name: Name
    path: Annotated[
        str,
        Meta(
            description="A folder (relative to the catalog's), or a Hugging Face id such as org/model. Required, "
            "except for an adapter."
        ),
    ] = ""
    revision: Annotated[str | None, Meta(description="Hugging Face branch, tag or commit.")] = None
    aliases: Annotated[tuple[Name, ...], Meta(description="Further names clients may use.")] = ()
    kind: Annotated[
        ModelKind | None,
        Meta(
            description="What it answers with: text (generate), vectors (embed), scores of labels (classify) or of "
            "pairs (rerank). Default: what its files say (docs/api.md)."
        ),
    ] = None
    base: Annotated[str | None, Meta(description="An adapter's base: the name of a model of this catalog.")] = None
    adapter: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="An adapter's files, as PEFT saves them: a folder, or a Hugging Face id."),
    ] = None
    lora: Annotated[LoraConfig | None, Meta(description="Room for adapters of this model.")] = None
    speculative: Annotated[SpeculativeConfig | None, Meta(description="Tokens guessed ahead. Default: none are.")] = (
        None
    )


class AdapterConfig(Section, frozen=True, kw_only=True):
    """A LoRA adapter of the catalog: an entry with `base` and `adapter`."""

    name: Name
    base: str
    adapter: str
    revision: str | None
    aliases: tuple[str, ...]
    slo: Slo
    late: LatePolicy
    max_wait_s: Seconds = field(name="max_wait")


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


class ImageConfig(Section, frozen=True, kw_only=True):
    """Images in requests to models that take them."""

    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts (`images.example.org`, `*.example.org`, with `:PORT` if it is not the usual one) from "
            "which images are fetched for clients, never over private addresses. Default: none; clients send data URLs."
        ),
    ] = ()
    max_bytes: Annotated[Bytes, Meta(description="Largest image, as it is sent or fetched.")] = field(
        name="max_size", default_factory=lambda: Bytes(8 << 20)
    )
    max_pixels: Annotated[int, Meta(ge=1, description="Most pixels of one image.")] = 1 << 24
    max_count: Annotated[int, Meta(ge=0, le=1000, description="Most images of one request; 0: none are taken.")] = 0
    max_prepared_bytes: Annotated[
        Bytes,
        Meta(description="Most that all images of a request may have as the model reads them; it waits in the queue."),
    ] = field(name="max_prepared", default_factory=lambda: Bytes(64 << 20))
    timeout_s: Annotated[Seconds, Meta(description="How long fetching one may take.")] = field(
        name="timeout", default_factory=lambda: Seconds(10.0)
    )


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


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP front door."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    front_workers: Annotated[int, Meta(ge=1, le=256, description="Front-door processes sharing the port.")] = 1
    redis_url: Annotated[
        str | None,
        Meta(description="A Redis or Valkey to use. Default: an embedded one, started and stopped with the server."),
    ] = None
    max_queue: Annotated[int, Meta(ge=1, description="Waiting requests of all models over which 429 is answered.")] = (
        20_000
    )
    max_body_bytes: Annotated[Bytes, Meta(description="Larger request bodies get 413.")] = field(
        name="max_body", default_factory=lambda: Bytes(32 << 20)
    )
    request_timeout_s: Annotated[
        Seconds | None, Meta(description="A request that has not finished by then ends with an error. Default: never.")
    ] = field(name="request_timeout", default=None)
    sse_keepalive_s: Annotated[
        Seconds,
        Meta(description="A stream that is silent for so long gets an SSE comment line, so that proxies keep it."),
    ] = field(name="sse_keepalive", default_factory=lambda: Seconds(5.0))
    write_timeout_s: Annotated[
        Seconds, Meta(description="A client that takes no byte for so long is cut off and its request cancelled.")
    ] = field(name="write_timeout", default_factory=lambda: Seconds(60.0))
    drain_timeout_s: Annotated[Seconds, Meta(description="How long a stopping server waits for running requests.")] = (
        field(name="drain_timeout", default_factory=lambda: Seconds(30.0))
    )
    cors_origins: Annotated[tuple[str, ...], Meta(description="Origins browsers may call from (`*` for all).")] = ()
    images: Annotated[ImageConfig, Meta(description="Images in requests.")] = field(default_factory=ImageConfig)


class LogConfig(Section, frozen=True, kw_only=True):
    """Logs and the decision log."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level that is logged.")] = (
        "info"
    )
    prompts: Annotated[bool, Meta(description="Log prompts too. Off: never a word of what was said.")] = False
    max_bytes: Annotated[Bytes, Meta(description="A log file is rotated when it reaches this size.")] = field(
        name="max_size", default_factory=lambda: Bytes(64 << 20)
    )
    backups: Annotated[int, Meta(ge=0, le=1000, description="Rotated files kept.")] = 3


class KeyConfig(Section, frozen=True, kw_only=True):
    """An API key. Without any key the API is open, and admin calls need the key in the state directory."""

    name: Annotated[
        str, Meta(min_length=1, max_length=100, description="Shown in logs and metrics instead of the key.")
    ]
    key: Annotated[str, Meta(min_length=8, description="The secret; better `${env:NAME}` than in the file.")]
    admin: Annotated[bool, Meta(description="May use the admin calls.")] = False
    requests_per_minute: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Requests per minute. Default: unlimited.")
    ] = None
    tokens_per_minute: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Prompt and answer tokens per minute. Default: unlimited.")
    ] = None
    models: Annotated[
        tuple[str, ...] | None, Meta(description="Models it may use: names, aliases or shell patterns. Default: all.")
    ] = None
