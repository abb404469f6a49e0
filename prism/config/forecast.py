"""What an engine will make of a model, foretold from its ``config.json``: which attention state it needs, which
kernels, and what would serve a model that cannot be served as it stands. Nothing is loaded, and SGLang is not asked.

What engines refuse is decided by them (``sglang_patches``); tests keep the two in step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from prism.config.engine_args import registries
from prism.config.model_kinds import architectures, kind_of, text_config
from prism.config.unserved import STATES, unserved
from prism.core.specs import DeviceKind, ModelKind


class KvKind(StrEnum):
    """The state that attention keeps of a text."""

    PLAIN = "keys and values per head"
    LATENT = "latent attention (MLA)"
    WINDOWS = "sliding windows beside full attention"
    STATES = "Mamba or linear attention"
    SPARSE = "sparse attention"


POOLS: Final = {
    KvKind.PLAIN: ("MHATokenToKVPool",),
    KvKind.LATENT: ("MLATokenToKVPool",),
    KvKind.WINDOWS: ("SWAKVPool",),
    KvKind.STATES: ("HybridLinearKVPool",),
    KvKind.SPARSE: (
        "DSATokenToKVPool",
        "MiniMaxSparseKVPool",
        "DeepSeekV4TokenToKVPool",
    ),
}
"""SGLang's memory pools that hold it."""

REFUSED: Final = frozenset((KvKind.SPARSE,))
"""What Prism's memory does not lay out (``sglang_patches/kv_guard.py``): refused when they are loaded."""

_SPARSE: Final = ("DeepseekV4", "MiniMaxM3Sparse")
"""How names of architectures begin whose attention is sparse whatever their configuration says."""

_STATE_LAYERS: Final = frozenset(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm"))
_STATE_KEYS: Final = (
    "mamba_d_state",
    "ssm_state_size",
    "hybrid_override_pattern",
    "linear_attn_config",
    "conv_L_cache",
)
HOST_BACK_ENDS: Final = ("torch_native", "triton", "intel_amx")
"""SGLang's back ends for attention that compute on a CPU: Triton's with attention in torch, the last with AMX."""
_HOST_QUANTISED: Final = frozenset(
    ("fp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8", "compressed-tensors", "modelopt", "gptq", "awq")
)
"""Quantised formats whose operators are here for CPUs (``sglang_patches/quantised_operators.py``), without experts."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a model will not be served, and what would."""

    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.why}; what would serve it: {self.instead}"


def kv_kind(config: Mapping[str, Any]) -> KvKind:
    """By the parsed ``config.json``, as SGLang reads it. A hybrid of several counts as the first of: states, sparse,
    latent, windows."""
    text = text_config(config)
    layers = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(layers, list):
        has_states = any(str(layer) in _STATE_LAYERS for layer in layers)
    else:
        has_states = any(key in text for key in _STATE_KEYS)
    if has_states:
        return KvKind.STATES
    names = architectures(config)
    if text.get("index_topk") or any(name.startswith(_SPARSE) for name in names):
        return KvKind.SPARSE
    if text.get("kv_lora_rank"):
        return KvKind.LATENT
    windows = any(name in registries().window_hybrids for name in names) or text.get("is_hybrid_swa") is True
    if "LagunaForCausalLM" in names and not text.get("sliding_window"):
        windows = False
    return KvKind.WINDOWS if windows else KvKind.PLAIN


def obstacles(
    config: Mapping[str, Any],
    engine_args: Mapping[str, Any],
    wanted: ModelKind | None,
    sentence_encoder: bool,
    devices: Collection[DeviceKind],
) -> Iterator[Obstacle]:
    """Why the model with this ``config.json`` will not be served. ``wanted``: the catalog's ``kind``; ``devices``: the
    kinds that are there, none if they are not known."""
    yield from _kind(config, wanted, sentence_encoder)
    yield from _state(config)
    on_host = bool(devices) and DeviceKind.CUDA not in devices
    yield from _family(config, engine_args, on_host)
    if on_host:
        yield from _kernels(config, engine_args)


def guessing_obstacles(
    config: Mapping[str, Any], engine_args: Mapping[str, Any], kind: ModelKind, devices: Collection[DeviceKind]
) -> Iterator[Obstacle]:
    """Why engines of the model cannot guess tokens (``speculative``)."""
    without = "the same without `speculative`"
    if kind is not ModelKind.GENERATE:
        yield Obstacle("`speculative` is for models that generate", without)
    elif (state := kv_kind(config)) is not KvKind.PLAIN:
        yield Obstacle(f"tokens are not guessed where attention keeps {state.value}", without)
    elif any(name in registries().multimodal for name in architectures(config)):
        yield Obstacle("tokens are not guessed by models that take images", without)
    if engine_args.get("page_size", 1) != 1:
        yield Obstacle("guessed tokens need pages of one token", "`page_size: 1`, or none")
    back_end = engine_args.get("attention_backend", "torch_native")
    if devices and DeviceKind.CUDA not in devices and back_end != "torch_native":
        yield Obstacle(f"{back_end} checks no guessed tokens on a CPU", "`attention_backend: torch_native`, or none")


def _kind(config: Mapping[str, Any], wanted: ModelKind | None, sentence_encoder: bool) -> Iterator[Obstacle]:
    own = kind_of(config, sentence_encoder)
    never = any(name in registries().pooled for name in architectures(config))
    if wanted is None or wanted is own or (own is ModelKind.GENERATE and wanted is ModelKind.EMBED):
        return
    if never or own is ModelKind.CLASSIFY or wanted is not ModelKind.GENERATE:
        shown = ", ".join(architectures(config))
        yield Obstacle(f"`kind` says {wanted.value}, and {shown} can only {own.value}", f"`kind: {own.value}`, or none")


def _state(config: Mapping[str, Any]) -> Iterator[Obstacle]:
    if (kind := kv_kind(config)) in REFUSED:
        why = f"its attention needs {kind.value}, whose memory engines here do not manage"
        yield Obstacle(why, "a model with plain, latent or windowed attention")


def _family(config: Mapping[str, Any], engine_args: Mapping[str, Any], on_host: bool) -> Iterator[Obstacle]:
    """What SGLang does not run, by the model's class."""
    names, known = architectures(config), {*registries().architectures, *registries().wrapped}
    found = unserved(names, config, engine_args, on_host=on_host)
    if found is not None and found.everywhere:
        yield Obstacle(f"SGLang runs {found.serves} on no device: {found.why}", "a family of docs/models.md")
    elif found is not None and found.layout != STATES:  # of which all are refused there
        yield Obstacle(f"SGLang runs {found.serves} on GPUs only: {found.why}", "a GPU (`cuda:N`)")
    elif found is None and names and known.isdisjoint(names) and "auto_map" not in config:  # its class comes with it
        yield Obstacle(f"SGLang has no {' or '.join(names)}", "a family of docs/models.md")


def _kernels(config: Mapping[str, Any], engine_args: Mapping[str, Any]) -> Iterator[Obstacle]:
    """What runs on GPUs only."""
    if kv_kind(config) is KvKind.STATES:
        yield Obstacle(f"it has {KvKind.STATES.value}, whose operators SGLang has for GPUs only", "a GPU (`cuda:N`)")
    back_end = engine_args.get("attention_backend")
    if back_end not in (None, *HOST_BACK_ENDS):
        yield Obstacle(
            f"attention by {back_end} is computed on GPUs only", "`attention_backend: torch_native`, or none"
        )
    method = engine_args.get("quantization") or _stored_quantisation(config)
    if method and not _computes_on_host(str(method), config):
        yield Obstacle(f"it is quantised ({method}), and that is computed on GPUs only", "a GPU (`cuda:N`)")


def _computes_on_host(method: str, config: Mapping[str, Any]) -> bool:
    """Whether a format's operators are here for CPUs."""
    if method == "mxfp4":  # its experts, all of it that is quantised, are made 16-bit when they are loaded
        return True
    said = _quantisation(config)
    four_bits = said.get("format") == "pack-quantized" or said.get("quant_algo", "FP8") != "FP8"
    experts = any(text_config(config).get(key) for key in _EXPERTS)
    return method in _HOST_QUANTISED and not four_bits and not experts


def _stored_quantisation(config: Mapping[str, Any]) -> str | None:
    found = _quantisation(config)
    return str(found.get("quant_method", "unknown")) if found else None


def _quantisation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("quantization_config") or text_config(config).get("quantization_config")
    return found if isinstance(found, dict) else {}
