"""Which engine arguments a catalog may pass through."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Final

import msgspec

OWNED: Final = {
    "model_path": "`path`",
    "tokenizer_path": "`path`",
    "served_model_name": "`name`",
    "tp_size": "`tp`",
    "context_length": "`context_length`",
    "revision": "`revision`",
    "host": "`server.host`",
    "port": "`server.port`",
    "api_key": "`keys`",
    "admin_api_key": "`keys`",
    "reasoning_parser": "`reasoning_parser`",
    "tool_call_parser": "`tool_call_parser`",
    "chat_template": "`chat_template`",
    "mem_fraction_static": "the device's `memory`",
    "max_total_tokens": "the device's `memory`",
    "device": "the device",
    "pp_size": "Prism: models are spread by `tp`",
    "dp_size": "Prism: copies of a model are placed by the scheduler",
    "enable_memory_saver": "Prism's memory",
    "sleep_on_idle": "Prism's engine worker",
    "skip_tokenizer_init": "Prism: the front door tokenises",
    "sampling_backend": "Prism, so that seeds give the same answer everywhere",
    "disable_overlap_schedule": "`engines.overlap`",
    **dict.fromkeys(
        ("speculative_algorithm", "speculative_draft_model_path", "enable_multi_layer_eagle"),
        "`speculative` (docs/models.md says which algorithms there are)",
    ),
    "speculative_num_draft_tokens": "`speculative.draft_tokens`",
    "speculative_num_steps": "`speculative.steps`",
    "speculative_eagle_topk": "`speculative.branches`",
    **dict.fromkeys(
        (
            "speculative_draft_model_revision",
            "speculative_draft_model_quantization",
            "speculative_draft_attention_backend",
            "speculative_draft_load_format",
            "speculative_token_map",
            "speculative_adaptive",
            "speculative_use_rejection_sampling",
        ),
        "Prism, whose account and images know the draft as it was saved, and whose answers do not depend on it",
    ),
    "speculative_ngram_capacity": "`speculative.ngrams`",
    "torchao_config": "Prism, whose images and account have no torchao tensors; quantise the checkpoint instead",
    "is_embedding": "`kind`",
    **dict.fromkeys(
        ("disaggregation_mode", "encoder_only", "language_only", "dllm_algorithm", "enable_mis"),
        "Prism, which has one engine answer a request",
    ),
    **dict.fromkeys(("enable_lora", "lora_paths"), "the catalog: an adapter is an entry with `base` and `adapter`"),
    "max_lora_rank": "`lora.max_rank`",
    "lora_target_modules": "`lora.target_modules`",
    "max_loras_per_batch": "`lora.slots`",
    "max_loaded_loras": "Prism, which keeps the adapters that were used last",
    "enable_lora_overlap_loading": "Prism: adapters are loaded between steps",
    "nnodes": "Prism: an engine stands on one machine",
    "node_rank": "Prism: an engine stands on one machine",
    "prefill_only_disable_kv_cache": "Prism's memory, which the engine's attention works in",
}
"""Arguments that Prism decides itself -> who decides."""

_PICKLED: Final = (
    "would load pickled weights, which can run code; convert them to safetensors",
    ("auto", "safetensors"),
)
_OTHER_KV: Final = (
    "needs KV in a layout that Prism's memory does not manage",
    ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
)
_OTHER_POOL: Final = ("has a memory of its own, beside the device's account", ("false",))
REFUSED_VALUES: Final[dict[tuple[str, str | bool], tuple[str, tuple[str, ...]]]] = {
    ("load_format", "pt"): _PICKLED,
    ("load_format", "npcache"): _PICKLED,
    ("kv_cache_dtype", "mxfp8"): _OTHER_KV,
    ("kv_cache_dtype", "nvfp4"): _OTHER_KV,
    ("kv_cache_dtype", "fp4_mx_block16"): _OTHER_KV,
    ("enable_unified_memory", True): _OTHER_POOL,
    ("enable_hierarchical_cache", True): _OTHER_POOL,
    ("enable_int8_mamba_checkpoint", True): _OTHER_POOL,
}
"""(Argument, value) -> why it is refused, and what is not."""


@lru_cache(maxsize=1)
def known_names() -> tuple[str, ...]:
    """All arguments of the pinned SGLang's engine, by the names of its ``ServerArgs`` fields; importing SGLang to ask
    takes seconds, so they are kept in ``engine_args.json`` (made by ``scripts/make_docs.py``)."""
    names: list[str] = json.loads(files(__package__).joinpath("engine_args.json").read_text("utf-8"))
    return tuple(names)


class Registries(msgspec.Struct, frozen=True):
    """What the pinned SGLang knows by name."""

    chat_template: tuple[str, ...]
    reasoning_parser: tuple[str, ...]
    tool_call_parser: tuple[str, ...]
    engine_args: dict[str, tuple[str | int | None, ...]]
    """Argument -> the values it takes, for those that take one of some."""
    architectures: tuple[str, ...]
    """Model classes, by the names that stand in a ``config.json``."""
    pooled: tuple[str, ...]
    """Those of them that never generate."""
    cross_encoders: tuple[str, ...]
    multimodal: tuple[str, ...]
    shares_head: tuple[str, ...]
    """Those that lend a model which guesses for them their embedding and head."""
    shows_layers: tuple[str, ...]
    """Those that show such a model what some of their layers computed (EAGLE-3)."""
    window_hybrids: tuple[str, ...]
    """Those that keep the KV of layers with a sliding window in a pool of its own."""
    wrapped: tuple[str, ...]
    """Classes of Transformers that are none of SGLang's models and that it runs with its own attention."""


@lru_cache(maxsize=1)
def registries() -> Registries:
    """Of the pinned SGLang, kept in ``engine_names.json`` as its argument names are."""
    return msgspec.json.decode(files(__package__).joinpath("engine_names.json").read_bytes(), type=Registries)
