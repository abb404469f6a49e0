"""Families that the pinned SGLang by itself could not load or run when a tiny model of each was tried: on a CPU, or on
any device. ``docs/models.md`` shows the table, and what is foretold of a model goes by it
(:mod:`prism.config.forecast`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prism.config.model_kinds import text_config

PLAIN: Final = "plain"
LATENT: Final = "latent rows (MLA)"
WINDOWS: Final = "sliding windows beside full attention"
STATES: Final = "states beside KV"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """One family. ``why``: SGLang's words."""

    serves: str
    architectures: tuple[str, ...]
    layout: str
    why: str
    everywhere: bool = False
    """On GPUs, too."""
    unless: tuple[str, ...] = ()
    """Keys of the configuration with which it is served."""
    back_end: str = ""
    """The ``attention_backend`` with which it is not; "": with any."""


UNSERVED: Final = (
    Unserved(
        serves="Llama-4",
        architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        layout=WINDOWS,
        why="its experts weigh tokens before they read them (`moe_forward_native`: `NotImplementedError`)",
    ),
    Unserved(
        serves="Gemma-4, as it is stored",
        architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        layout=WINDOWS,
        why="`Gemma4TextConfig` has no `swa_num_key_value_heads`; with these it is served",
        unless=("swa_num_key_value_heads",),
    ),
    Unserved(
        serves="Gemma-3n",
        architectures=("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        layout=WINDOWS,
        why="`intermediate_size` is a list: `unsupported operand type(s) for %`, on CPUs alone",
    ),
    Unserved(
        serves="DBRX",
        architectures=("DbrxForCausalLM",),
        layout=PLAIN,
        why="its configuration refuses what others say: `Found unknown kwargs={'dtype': 'float32'}`",
        everywhere=True,
    ),
    Unserved(
        serves="Trinity (AFMoE)",
        architectures=("AfmoeForCausalLM",),
        layout=PLAIN,
        why="`Could not run 'sglang::inplace_fused_experts'`",
    ),
    Unserved(
        serves="LongCat-Flash",
        architectures=("LongcatFlashForCausalLM",),
        layout=LATENT,
        why="`CUDA driver version is insufficient for CUDA runtime version`",
    ),
    Unserved(
        serves="HunYuan, MoE and V3",
        architectures=("HunYuanMoEV1ForCausalLM", "HYV3ForCausalLM"),
        layout=PLAIN,
        why="`HunYuanMoEV1Config` has no `moe_intermediate_size`, `HYV3Config` no `route_norm`; with these a "
        "`KeyError` while it loads, and answers that are one token",
    ),
    Unserved(
        serves="HRM-Text",
        architectures=("HrmTextForCausalLM",),
        layout=PLAIN,
        why="`shape mismatch: value tensor of shape [6, 4, 128]` when it stores its KV",
    ),
    Unserved(
        serves="LFM2 and LFM2-MoE",
        architectures=("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        layout=STATES,
        why="`sgl_kernel` has no `fused_sigmoid_gating_delta_rule_update_cpu`",
    ),
    Unserved(
        serves="Qwen3-Next",
        architectures=("Qwen3NextForCausalLM",),
        layout=STATES,
        why="`Qwen3NextConfig` has no `full_attention_interval` (Transformers 5)",
    ),
    Unserved(
        serves="Qwen-3.5, text alone",
        architectures=("Qwen3_5ForCausalLM",),
        layout=STATES,
        why="`Qwen3_5ForCausalLM has no SGlang implementation`",
        everywhere=True,
    ),
    Unserved(
        serves="MiniMax-01",
        architectures=("MiniMaxForCausalLM",),
        layout=STATES,
        why="`No module or parameter named 'model.layers.0.block_sparse_moe'`",
        everywhere=True,
    ),
    Unserved(
        serves="Falcon",
        architectures=("FalconForCausalLM",),
        layout=PLAIN,
        why="`FalconForCausalLM has no SGlang implementation`",
        everywhere=True,
    ),
    Unserved(
        serves="HunYuan, dense",
        architectures=("HunYuanDenseV1ForCausalLM",),
        layout=PLAIN,
        why="shapes of its queries' norms: `mat1 and mat2 shapes cannot be multiplied`",
    ),
    Unserved(
        serves="Command-R7B and A (Cohere-2), with Triton",
        architectures=("Cohere2ForCausalLM",),
        layout=PLAIN,
        why="it does not tell the back end of its layers' windows",
        back_end="triton",
    ),
    Unserved(
        serves="Solar",
        architectures=("SolarForCausalLM",),
        layout=PLAIN,
        why="`make_layers`: `not enough values to unpack`",
        everywhere=True,
    ),
    Unserved(
        serves="GPT-NeoX and Pythia",
        architectures=("GPTNeoXForCausalLM",),
        layout=PLAIN,
        why="`No module or parameter named 'model.embed_out' in TransformersForCausalLM`",
        everywhere=True,
    ),
    Unserved(
        serves="GLM-4-9B (of Transformers' class), FlexOlmo, Doge",
        architectures=("GlmForCausalLM", "FlexOlmoForCausalLM", "DogeForCausalLM"),
        layout=PLAIN,
        why="`Unsupported TP style 'colwise_gather_output' for Transformers backend`",
        everywhere=True,
    ),
    Unserved(
        serves="JetMoe, Youtu",
        architectures=("JetMoeForCausalLM", "YoutuForCausalLM"),
        layout=PLAIN,
        why="`shape mismatch: value tensor of shape [40, 4, 32]` when it stores its KV",
        everywhere=True,
    ),
    Unserved(
        serves="nanochat",
        architectures=("NanoChatForCausalLM",),
        layout=PLAIN,
        why="norms of queries and keys: `Expected hidden_size to be 128, but found: 32`",
    ),
    Unserved(
        serves="Nemotron (3 and 4)",
        architectures=("NemotronForCausalLM",),
        layout=PLAIN,
        why="`NemotronForCausalLM has no SGLang implementation`",
        everywhere=True,
    ),
)


def unserved(
    names: Iterable[str], config: Mapping[str, Any], engine_args: Mapping[str, Any], *, on_host: bool
) -> Unserved | None:
    """The entry that the architectures ``names`` fall under with this parsed ``config.json``; None: SGLang runs it
    there. ``on_host``: whether there are CPUs alone."""
    given, text = set(names), text_config(config)
    for family in UNSERVED:
        if given.isdisjoint(family.architectures) or not (family.everywhere or on_host):
            continue
        back_end = family.back_end in ("", engine_args.get("attention_backend"))
        if back_end and not (family.unless and all(key in text for key in family.unless)):
            return family
    return None
