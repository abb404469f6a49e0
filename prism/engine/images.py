"""The names under which engines keep their parameters in the store, known without starting one."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any, Final

import xxhash

from prism.engine.sglang_args import COMMON, CUDA, HOST
from prism.weights.packs.format import PackKey

_FORM: Final = 2
"""Of what an image says of its model (:class:`prism.engine.weight_seat.ImageMeta`): others are made anew."""

_NOT_IN_THE_BYTES: Final = frozenset(
    (
        "model_path",
        "served_model_name",
        "tp_size",
        "dtype",
        "context_length",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "max_running_requests",
        "max_total_tokens",
        "schedule_policy",
        "schedule_conservativeness",
        "disable_overlap_schedule",
        "log_level",
        "random_seed",
        "disable_radix_cache",
        "enable_lora",
        "max_loras_per_batch",
        "max_lora_rank",
        "lora_target_modules",
        "lora_drain_wait_threshold",
        "lora_backend",
        "enable_mixed_chunk",
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "speculative_ngram_capacity",
    )
)
"""Arguments that leave a model's parameters as they are, or that a key names on its own. What is not listed may change
them: a new argument costs a second image, not a wrong one."""


def layout_name(sglang_version: str, world: int, rank: int, dtype: str, variant: str = "") -> str:
    """The pack layout of an engine: parameters as they lie in SGLang ``sglang_version`` on rank ``rank`` of ``world``,
    started with settings that :func:`variant_of` names."""
    release = re.sub(r"[^0-9A-Za-z.]", "", sglang_version)
    name = f"sglang-{release}/form{_FORM}/tp{world}/rank{rank}/{dtype}"
    return f"{name}/{variant}" if variant else name


def variant_of(arguments: dict[str, Any]) -> str:
    """Eight hexadecimal digits for the ``ServerArgs`` keywords that may change an engine's parameters (overrides of the
    model's configuration, quantisation, back ends); "" when they are Prism's own."""
    ours = (COMMON, HOST, CUDA)
    found = {
        name: value
        for name, value in arguments.items()
        if name not in _NOT_IN_THE_BYTES and not any(name in known and known[name] == value for known in ours)
    }
    return xxhash.xxh3_64_hexdigest(json.dumps(found, sort_keys=True, default=str).encode())[:8] if found else ""


def draft_keys(mark: str, world: int, arguments: dict[str, Any]) -> tuple[PackKey, ...]:
    """The same for the model that guesses in such an engine; what it shares with the other is not in its packs."""
    return image_keys(mark, world, arguments | {"guesses_as": arguments["speculative_algorithm"]})


def image_keys(mark: str, world: int, arguments: dict[str, Any]) -> tuple[PackKey, ...]:
    """The packs of every rank of an engine for the model with fingerprint ``mark``, which is started with the
    ``ServerArgs`` keywords ``arguments``."""
    dtype, variant = str(arguments.get("dtype", "auto")), variant_of(arguments)
    return tuple(PackKey(mark, layout_name(version("sglang"), world, rank, dtype, variant)) for rank in range(world))
