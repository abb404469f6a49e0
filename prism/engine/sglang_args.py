"""From a catalog model to the keyword arguments of SGLang's ``ServerArgs``. No SGLang import: the pool calls this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from prism.config.engine_args import OWNED
from prism.config.model_kinds import architectures, reads_both_ways
from prism.core.errors import InvalidValue
from prism.core.specs import DeviceKind, LoraRoom, ModelKind, ModelSpec, Speculation

COMMON: Final[dict[str, Any]] = {
    "page_size": 1,
    "sampling_backend": "pytorch",  # the others know no seeds
    "grammar_backend": "xgrammar",
    "log_level": "warning",
    "random_seed": 1,
    "sleep_on_idle": False,  # the worker sleeps on its own channel
    "max_running_requests": 64,
    "mem_fraction_static": 0.9,
}
HOST: Final[dict[str, Any]] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,  # it would hide the scheduler's time behind the same processor's work
    "chunked_prefill_size": 2048,
}
CUDA: Final[dict[str, Any]] = {
    "device": "cuda",
    "attention_backend": "triton",
    # Graphs are captured at every activation: those of prefill (58 sizes by default) take most of it and a gigabyte.
    "disable_prefill_cuda_graph": True,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64],
    "chunked_prefill_size": 2048,
    "disable_overlap_schedule": False,
}
POOLED: Final[dict[str, Any]] = {
    "is_embedding": True,
    "disable_radix_cache": True,  # a text is read once: no KV of it is kept
    "max_running_requests": 256,  # short texts fill a step only if there are many
}
"""For models that answer with a vector or scores."""


def server_arguments(spec: ModelSpec, kind: DeviceKind, overlap: bool | None = None) -> dict[str, Any]:
    """Keyword arguments for ``ServerArgs``. ``overlap``: whether a step is prepared while the device computes the one
    before; None: on GPUs. Raises :class:`InvalidValue` for an engine argument that is Prism's own."""
    for name, value in spec.engine_args:
        if name in OWNED:
            raise InvalidValue(f"models.{spec.name}.engine_args.{name}", value, f"is set by {OWNED[name]}")
    arguments = {
        **COMMON,
        **(CUDA if kind is DeviceKind.CUDA else HOST),
        "model_path": spec.path,
        "served_model_name": spec.name,
        "tp_size": spec.tp,
        "context_length": spec.context_tokens or None,
    }
    if (dtype := stored_dtype(Path(spec.path))) is not None:
        arguments["dtype"] = dtype
    if spec.kind is not ModelKind.GENERATE:
        arguments |= POOLED
    if spec.lora is not None:
        arguments |= lora_arguments(spec.lora, kind)
    arguments.update({name: thaw(value) for name, value in spec.engine_args})
    if spec.speculation is not None:
        arguments |= speculative_arguments(spec.speculation)
    if overlap is not None:
        arguments["disable_overlap_schedule"] = not overlap
    # Penalties are counted on the host then, behind a step in flight; guesses are made from the last step's tokens.
    if arguments.get("enable_mixed_chunk") or spec.speculation is not None:
        arguments["disable_overlap_schedule"] = True
    return arguments | _encoder_arguments(_config(Path(spec.path)), arguments)


def _encoder_arguments(config: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What the model with this ``config.json`` needs if its tokens see those behind them; nothing for others."""
    if not reads_both_ways(architectures(config)):
        return {}
    needed: dict[str, Any] = {"chunked_prefill_size": -1, "disable_radix_cache": True}
    if "position_embedding_type" not in config:  # SGLang asks for it, and newer checkpoints leave the default out
        overrides = json.loads(arguments.get("json_model_override_args", "{}"))
        overrides.setdefault("position_embedding_type", "absolute")
        needed["json_model_override_args"] = json.dumps(overrides)
    return needed


def speculative_arguments(speculation: Speculation) -> dict[str, Any]:
    """What has an engine guess tokens; how broad and deep n-grams are is SGLang's ``speculative_ngram_*``."""
    arguments: dict[str, Any] = {
        "speculative_algorithm": speculation.algorithm.value.upper(),
        "speculative_num_draft_tokens": speculation.draft_tokens,
        "enable_mixed_chunk": False,
    }
    if not speculation.draft:
        return arguments | {"speculative_ngram_capacity": speculation.ngrams}
    return arguments | {
        "speculative_draft_model_path": speculation.draft,
        "speculative_num_steps": speculation.steps,
        "speculative_eagle_topk": speculation.branches,
    }


_ADAPTER_WAIT_S: Final = 1.0
"""Requests of adapters that hold no slot wait so long; then one that holds a slot takes no further requests."""


def lora_arguments(room: LoraRoom, kind: DeviceKind) -> dict[str, Any]:
    """What makes room for adapters. Requests of the base take a slot too, so that there is one more."""
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras_per_batch": room.slots + 1,
        "max_lora_rank": room.max_rank,
        "lora_target_modules": list(room.modules),
        "lora_drain_wait_threshold": _ADAPTER_WAIT_S,
    }
    return arguments | ({"lora_backend": "torch_native"} if kind is DeviceKind.HOST else {})


def stored_dtype(folder: Path) -> str | None:
    """The element type the model was saved in; None if its configuration does not say. SGLang's own choice would turn
    float32 models into float16, which is another model and slow on CPUs."""
    config = _config(folder)
    found = config.get("dtype") or config.get("torch_dtype")
    return found if found in ("float32", "bfloat16", "float16") else None


def _config(folder: Path) -> dict[str, Any]:
    """The model's ``config.json``; empty where it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


_GROUP_WORDS: Final = ("ep_", "cp_", "dp_", "all_reduce", "symm_mem", "mscclpp", "nccl", "pdmux", "dist_", "a2a", "p2p")


def group_shape(spec: ModelSpec) -> str:
    """What decides, beside the devices, which process groups and communicators the ranks of an engine make. Ranks that
    were an engine of this shape can be another; one rank alone has no shape."""
    if spec.tp == 1:
        return ""
    found = {name: thaw(value) for name, value in spec.engine_args if any(word in name for word in _GROUP_WORDS)}
    return json.dumps(found, sort_keys=True, default=str)


def thaw(value: object) -> object:
    """Frozen catalog values (tuples) as the lists JSON has."""
    return [thaw(v) for v in value] if isinstance(value, tuple) else value
