"""A model of the catalog: its objectives and options, its adapters' room, who guesses its tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from prism.config.sections.base import Section
from prism.config.units import Bytes, Seconds
from prism.core.settings import LiveMode
from prism.core.specs import LatePolicy, LendingRole, ModelKind, Prefer, Scheduling, SpeculativeAlgorithm

MODEL_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}$"
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
    live_scaling: Annotated[
        LiveMode | None,
        Meta(
            description="When its further instances begin to serve, as `live_scaling.mode` says for models that do not "
            "say so themselves (whole, pair, pipelines, auto)."
        ),
    ] = None
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
