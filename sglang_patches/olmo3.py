"""OLMo-3: how its positions turn. SGLang's configuration of it was written for Transformers 4; with 5 it loses the base
(`rope_parameters` is None), and with a scaling it ends while Transformers looks for the longest sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches.hooks import Hook, HookKind


def keep_turns(original: Callable[..., None], config: Any, **given: Any) -> None:
    """Around ``Olmo3Config.__init__``. Checkpoints say ``rope_theta`` and ``rope_scaling``, those that Transformers 5
    has written ``rope_parameters``."""
    turns = {"rope_type": "default", "rope_theta": given.get("rope_theta", 10000.0)}
    turns |= given.pop("rope_scaling", None) or {}
    turns |= given.pop("rope_parameters", None) or {}
    config.max_position_embeddings = given.get("max_position_embeddings", 2048)
    original(config, **given)
    config.rope_parameters = turns


HOOKS = (
    Hook(
        "sglang.srt.configs.olmo3.Olmo3Config.__init__",
        HookKind.AROUND,
        keep_turns,
        (
            "self",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "hidden_act",
            "max_position_embeddings",
            "initializer_range",
            "use_cache",
            "pad_token_id",
            "bos_token_id",
            "eos_token_id",
            "tie_word_embeddings",
            "rope_theta",
            "rope_scaling",
            "attention_bias",
            "attention_dropout",
            "rms_norm_eps",
            "sliding_window",
            "layer_types",
            "kwargs",
        ),
        "the base of OLMo-3's positions is kept",
    ),
)
