"""Families whose attention keeps K and V per token, as stock SGLang serves them on a CPU: tiny models of each, for
`test_every_family.py` and `docs/models.md`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from tests.engine.families import EXPERTS, FAMILIES, PLAIN, THREE_OF_FOUR, TRITON_ONLY, Family

_WIDE: Final[dict[str, Any]] = {"head_dim": 32}
_QUIET: Final = {"embed_tokens": 0.15, "o_proj": 6.0, "down_proj": 6.0}
"""What layers add outweighs the token itself, whose embedding is large and is the head, too."""


_GPT: Final[dict[str, Any]] = {"n_positions": 1024, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_inner": 256}
_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LIVELY: Final = {"bias": 0.1, "wte": 0.15, "c_proj": 6.0}
"""With large biases and embeddings these say one token always."""


def plain(config: str, serves: str, scaled: dict[str, float] | None = None, **options: Any) -> Family:
    return Family(config=config, serves=serves, layout=PLAIN, options=options, scaled=scaled or {})


def by_itself(family: Family) -> Family:
    """SGLang answers otherwise than Hugging Face."""
    return replace(family, like_hugging_face=False)


def as_architecture(family: Family, name: str, **stored: Any) -> Family:
    """The same tensors, read by another of SGLang's classes."""
    return replace(family, stored={"architectures": [name], **stored})


EVERYDAY: Final = (
    plain(
        "Llama",
        "Llama-3",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    plain("Mistral", "Mistral", sliding_window=None, **_WIDE),
    plain("Ministral3", "Ministral-3", sliding_window=None, **_WIDE),
    plain("Mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    plain("Qwen2", "Qwen2 and 2.5"),
    plain(
        "Qwen3",
        "Qwen3, with YaRN",
        rope_parameters=_YARN,
        **_WIDE,
    ),
    plain("Qwen3Moe", "Qwen3-MoE", norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], **EXPERTS, **_WIDE),
    plain("Gemma", "Gemma", _QUIET, **_WIDE),
    replace(
        plain("Gemma2", "Gemma-2", _QUIET, num_hidden_layers=4, sliding_window=32, query_pre_attn_scalar=32, **_WIDE),
        stored={"hidden_act": "gelu_pytorch_tanh"},
    ),
    plain(
        "Gemma3Text",
        "Gemma-3 (text)",
        _QUIET,
        num_hidden_layers=4,
        sliding_window=32,
        query_pre_attn_scalar=32,
        layer_types=THREE_OF_FOUR,
        **_WIDE,
    ),
    plain("Phi3", "Phi-3", sliding_window=None),
    plain("Glm4", "GLM-4", partial_rotary_factor=0.5, **_WIDE),
    plain(
        "Glm4Moe",
        "GLM-4.5 and 4.6",
        partial_rotary_factor=0.5,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        **_WIDE,
    ),
    plain("Olmo", "OLMo", num_key_value_heads=4),
    plain("Olmo2", "OLMo-2"),
    plain("Olmoe", "OLMoE", num_key_value_heads=4, num_experts=4, num_experts_per_tok=2),
    plain(
        "Granite",
        "Granite",
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
    ),
    plain(
        "GraniteMoe",
        "Granite-MoE",
        num_local_experts=4,
        num_experts_per_tok=2,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
    ),
    plain("Cohere", "Command-R", logit_scale=1.0),
    plain("Starcoder2", "StarCoder2", sliding_window=None, use_bias=True),
    plain("StableLm", "StableLM", num_key_value_heads=4),
    plain("Arcee", "Arcee"),
    plain("OPT", "OPT", num_key_value_heads=4, ffn_dim=256, word_embed_proj_dim=128),
    as_architecture(plain("Qwen2", "MiMo"), "MiMoForCausalLM"),
    as_architecture(plain("Llama", "InternLM3"), "InternLM3ForCausalLM"),
    plain(
        "Qwen2Moe",
        "Qwen1.5-MoE and Qwen2-MoE",
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **EXPERTS,
    ),
    plain(
        "Phi3",
        "Phi-4, with LongRoPE",
        sliding_window=None,
        original_max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "original_max_position_embeddings": 512,
        },
    ),
    plain("Persimmon", "Persimmon", num_key_value_heads=4),
    plain("GPT2", "GPT-2", _LIVELY, num_key_value_heads=4, **_GPT),
    plain("GPTBigCode", "StarCoder", _LIVELY, num_key_value_heads=1, **_GPT),
    plain("GPTJ", "GPT-J", {"bias": 0.0}, num_key_value_heads=4, rotary_dim=16, **_GPT),
    by_itself(plain("Phi", "Phi", num_key_value_heads=4)),
    as_architecture(
        by_itself(
            plain(
                "Phimoe",
                "PhiMoE",
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=None,
                lm_head_bias=True,
                attention_bias=True,
            )
        ),
        "PhiMoEForCausalLM",
    ),
    by_itself(
        plain(
            "GraniteMoeHybrid",
            "Granite-4, dense",
            layer_types=["attention"] * 2,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=128,
            position_embedding_type="rope",
        )
    ),
    by_itself(plain("Mistral", "Mistral, with windows", sliding_window=32, **_WIDE)),
    as_architecture(
        plain("Llama", "MiniCPM"),
        "MiniCPMForCausalLM",
        scale_emb=1.0,
        dim_model_base=128,
        scale_depth=math.sqrt(2),  # with two layers: what Llama computes
    ),
    as_architecture(plain("Llama", "XVERSE", num_key_value_heads=4), "XverseForCausalLM"),
    as_architecture(plain("Llama", "IQuest-Coder"), "IQuestCoderForCausalLM"),
    as_architecture(plain("Llama", "TeleFLM"), "TeleFLMForCausalLM"),
    by_itself(plain("Cohere2", "Command-R7B and A (Cohere-2)", num_hidden_layers=4, sliding_window=32, **_WIDE)),
    by_itself(
        plain(
            "Cohere2Moe",
            "Command (Cohere-2), MoE",
            num_hidden_layers=4,
            sliding_window=32,
            num_experts=4,
            num_experts_per_tok=2,
            **_WIDE,
        )
    ),
    replace(
        plain("MiniMaxM2", "MiniMax-M2", num_local_experts=4, num_experts_per_tok=2, **_WIDE),
        stored={"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 32},
    ),
    plain(
        "Ernie4_5_Moe",
        "ERNIE-4.5 MoE",
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        **_WIDE,
    ),
    plain("Helium", "Helium", **_WIDE),
    plain("Jais2", "Jais-2", **_WIDE),
    plain("Cwm", "CWM", layer_types=["full_attention"] * 2, rope_parameters=_ROPE, **_WIDE),
    plain(
        "Dots1",
        "dots.llm1",
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        **_WIDE,
    ),
    plain(
        "SolarOpen",
        "Solar-Open",
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        **_WIDE,
    ),
    plain("HyperCLOVAX", "HyperCLOVA X", **_WIDE),
    plain(
        "GraniteMoeShared",
        "Granite-MoE, with shared experts",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    plain("BitNet", "BitNet"),
    plain("Olmo3", "OLMo-3", num_hidden_layers=4, layer_types=THREE_OF_FOUR, sliding_window=32),
)
EVERY_PLAIN: Final = (*EVERYDAY, *(family for family in FAMILIES if family not in TRITON_ONLY))
