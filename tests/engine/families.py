"""Model families by what their attention keeps: tiny models made on the spot, and what of each is tested.

:data:`FAMILIES` parametrises `test_families.py` and `test_layouts.py`, and `docs/models.md` is made of it. A kind of
model that is not about attention (adapters, embeddings, images) adds a section of its own to
`tests/docs/model_table.py`.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from prism.config.forecast import obstacles
from prism.core.specs import DeviceKind

TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
SMALL: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
    "initializer_range": 0.1,
}
EXPERTS: Final[dict[str, Any]] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
YARN: Final[dict[str, Any]] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    }
}
"""As DeepSeek-V3 has it: without a scaling SGLang 0.5.16 asserts on a CPU (``get_rope_cpu``)."""
THREE_OF_FOUR: Final = ["sliding_attention"] * 3 + ["full_attention"]
WINDOW: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 32,
    "layer_types": THREE_OF_FOUR,
}
WINDOW_BY_LAYER: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "sliding_window": 32,
    "layer_types": THREE_OF_FOUR,
}
TWO_ROPES: Final[dict[str, Any]] = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }
}
TRITON: Final[dict[str, Any]] = {"attention_backend": "triton", "triton_attention_num_kv_splits": 1}
"""Attention in torch there (`sglang_patches/host_attention.py`); SGLang without Prism runs the kernels under Triton's
interpreter, twice as slowly with prompts in eight parts."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One tiny model. ``config``: the class of Transformers without its ``Config``; ``options``: beside
    :data:`SMALL`."""

    config: str
    serves: str
    """The models that have this shape, in words."""
    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    stored: dict[str, Any] = field(default_factory=dict)
    """What `config.json` says and Transformers does not write."""
    engine: dict[str, Any] = field(default_factory=dict)
    wide: dict[str, Any] = field(default_factory=dict)
    """Options that make tokens large, so that few fill a page."""
    scaled: dict[str, float] = field(default_factory=dict)
    """Factors of parameters, by a part of their names: with random weights some models say one token only."""
    like_hugging_face: bool = True
    """False: SGLang itself answers otherwise on a CPU; answers are compared with those of SGLang without Prism."""
    full_kv: bool = True
    """False: SGLang's Triton back end cannot do without the pool of windows (``disable_hybrid_swa_memory``)."""
    key: str = ""
    """Its name here; "": :attr:`config`, which another one has, too."""

    @property
    def name(self) -> str:
        return self.key or self.config


PLAIN: Final = "plain"
LATENT_ROWS: Final = "latent rows (MLA)"
WINDOWS: Final = "sliding windows beside full attention"

FAMILIES: Final = (
    Family(config="SmolLM3", serves="SmolLM3", layout=PLAIN),  # its rotary frequencies, of the first block, come last
    Family(config="SeedOss", serves="Seed-OSS", layout=PLAIN, options={"head_dim": 32}),
    Family(config="Ernie4_5", serves="ERNIE-4.5", layout=PLAIN, options={"head_dim": 32}),
    Family(config="Apertus", serves="Apertus", layout=PLAIN),  # tensors without dimensions
    Family(
        config="DeepseekV3",
        serves="DeepSeek-V3 and R1, Kimi-K2",
        layout=LATENT_ROWS,
        options={**LATENT, **YARN, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        stored={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        engine=TRITON,
        wide={"num_hidden_layers": 8},
    ),
    Family(
        config="DeepseekV2",
        serves="DeepSeek-V2",
        layout=LATENT_ROWS,
        options={**LATENT, **YARN, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        stored={"moe_layer_freq": 1, "scoring_func": "softmax"},
        engine=TRITON,
        like_hugging_face=False,
    ),
    Family(
        config="DeepseekV3",  # has the tensors of one whose layers are all dense
        key="MiniCPM3",
        serves="MiniCPM3",
        layout=LATENT_ROWS,
        options={**LATENT, "first_k_dense_replace": 2},
        stored={
            "architectures": ["MiniCPM3ForCausalLM"],
            "scale_emb": 1.0,
            "dim_model_base": 128,
            "scale_depth": math.sqrt(2),
        },
        engine=TRITON,
        like_hugging_face=False,  # which has it in its repository only
    ),
    Family(
        config="Glm4MoeLite",
        serves="GLM-4.7-Flash",
        layout=LATENT_ROWS,
        options={**LATENT, "norm_topk_prob": True},
        stored={"moe_layer_freq": 1},
        engine=TRITON,
    ),
    Family(
        config="Mellum",
        serves="Mellum",
        layout=WINDOWS,
        options={
            **WINDOW,
            **EXPERTS,
            **TWO_ROPES,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "norm_topk_prob": True,
        },
        engine=TRITON,
        wide={"head_dim": 256, "num_key_value_heads": 4},
    ),
    Family(
        config="GptOss",
        serves="gpt-oss",
        layout=WINDOWS,
        options={
            **WINDOW,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        stored={"swiglu_limit": 7.0},
        engine={**TRITON, "moe_runner_backend": "triton"},  # with the default SGLang cannot load it on a CPU
    ),
    Family(
        config="Qwen2",  # has the tensors of one whose layers are all dense
        serves="MiMo-V2",
        layout=WINDOWS,
        options=WINDOW_BY_LAYER,
        stored={
            "architectures": ["MiMoV2FlashForCausalLM"],
            "head_dim": 32,
            "v_head_dim": 32,
            "attention_bias": True,
            "layernorm_epsilon": 1e-6,
            "hybrid_layer_pattern": [1, 1, 1, 0],
            "sliding_window_size": 31,  # without the current token
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "moe_layer_freq": [0] * 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
        engine=TRITON,
    ),
    Family(
        config="Qwen3",  # has the tensors, whose norms are read otherwise
        serves="Step-3.5",
        layout=WINDOWS,
        options={**WINDOW_BY_LAYER, "head_dim": 32},
        stored={
            "architectures": ["Step3p5ForCausalLM"],
            "model_type": "step3p5",
            "num_attention_groups": 2,
            "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
            "moe_layers_enum": "99",
            "partial_rotary_factors": [1.0] * 4,
            "rope_theta": [10000.0] * 4,
            "yarn_only_types": [],
            "swiglu_limits": [0.0] * 4,
            "swiglu_limits_shared": [0.0] * 4,
            "use_head_wise_attn_gate": False,
            "share_expert_dim": 64,
        },
        engine=TRITON,
        like_hugging_face=False,  # which does not have it
        full_kv=False,
    ),
    Family(
        config="Gemma4Text",
        serves="Gemma-4 (text)",
        layout=WINDOWS,
        options={**WINDOW, "hidden_size_per_layer_input": 0, "global_head_dim": 32},
        stored={  # which SGLang asks for and the configuration does not have
            "moe_intermediate_size": 64,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
        },
        engine=TRITON,
        scaled={"embed_tokens": 0.15, "o_proj": 6.0, "down_proj": 6.0},
    ),
    Family(config="Laguna", serves="Laguna", layout=WINDOWS, options={**WINDOW, **EXPERTS, **TWO_ROPES}, engine=TRITON),
    Family(
        config="Exaone4",
        serves="EXAONE-4",
        layout=PLAIN,
        options=WINDOW,
        stored={"sliding_window_pattern": "LLLG"},
        engine=TRITON,  # SGLang has no other back end for it here
        like_hugging_face=False,
        full_kv=False,
    ),
)
TRITON_ONLY: Final = tuple(family for family in FAMILIES if family.engine)
REPRESENTS: Final = {LATENT_ROWS: "DeepseekV3", WINDOWS: "Mellum"}
"""One family of each layout, for what is about the layout: devices, neighbours, prefixes, kills, pressure."""


def named(name: str) -> Family:
    """The family of this configuration class, or of this ``key``."""
    return next(family for family in FAMILIES if family.name == name)


def make_model(family: Family, folder: Path, like: Path, *, wide: bool = False) -> Path:
    """A tiny model of ``family`` with random weights, and the tokenizer of the model ``like``."""
    import torch
    import transformers

    config = getattr(transformers, f"{family.config}Config")(**(SMALL | family.options | (family.wide if wide else {})))
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of Transformers' modules use what torch deprecates
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 and "norm" not in name:
            torch.nn.init.uniform_(parameter, 0.1, 0.5)
        for part, factor in family.scaled.items():
            if part in name:
                parameter.data.mul_(factor)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | family.stored))
    for name in TOKENIZER:
        if (like / name).exists():
            shutil.copy(like / name, folder)
    return folder


def foretold(path: Path, family: Family) -> list[str]:
    """Why `prism config check` says that a machine without a GPU does not serve the model in ``path``."""
    config = json.loads((path / "config.json").read_text())
    return [str(found) for found in obstacles(config, family.engine, None, False, (DeviceKind.HOST,))]
