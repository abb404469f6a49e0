"""Models whose attention keeps more, or other things, than K and V per token: few layers in real shapes on a GPU, the
tests' tiny ones in a dry run. Weights are random.

    python -m scripts.gpu.layouts NAME DIR TOKENIZER [--tiny]
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any, Final

from tests.engine.families import EXPERTS, LATENT_ROWS, PLAIN, REPRESENTS, WINDOWS, Family, make_model, named

WINDOW_TOKENS: Final = 1024
WIDE: Final[dict[str, Any]] = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
    "initializer_range": 0.03,
}
LATENT_SIZES: Final[dict[str, Any]] = {
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 512,
}
STATES: Final = Family(
    config="Qwen3Next",
    serves="Qwen3-Next",
    layout="states of linear attention beside KV",
    options={
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
    like_hugging_face=False,
)
STATE_SIZES: Final[dict[str, Any]] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
WINDOW_SIZES: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "sliding_window": WINDOW_TOKENS,
    "num_experts": 8,
    "moe_intermediate_size": 512,
}
CHUNKS: Final = Family(
    config="Llama4Text",
    serves="Llama-4",
    layout=PLAIN,
    options={
        "num_hidden_layers": 4,
        "head_dim": 32,
        "intermediate_size_mlp": 256,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 3],
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    like_hugging_face=False,
)
CHUNK_SIZES: Final[dict[str, Any]] = {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size_mlp": 4096}
SINK_SIZES: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "sliding_window": 128,
}
SHAPES: Final = {
    "chunks": (CHUNKS, CHUNK_SIZES),
    "sinks": (named("GptOss"), SINK_SIZES),
    "latent": (named(REPRESENTS[LATENT_ROWS]), LATENT_SIZES),
    "windows": (named(REPRESENTS[WINDOWS]), WINDOW_SIZES),
    "states": (STATES, STATE_SIZES),
}
"""Name -> the family, and what its options are on a GPU beside :data:`WIDE`."""


def family(name: str, *, tiny: bool) -> Family:
    found, sizes = SHAPES[name]
    return found if tiny else dataclasses.replace(found, options={**found.options, **WIDE, **sizes}, engine={})


def latent_token_bytes(layers: int) -> int:
    """Of the latent model on a GPU: one row of bfloat16 per layer."""
    return layers * 2 * int(LATENT_SIZES["kv_lora_rank"] + LATENT_SIZES["qk_rope_head_dim"])


def write(name: str, folder: Path, tokenizer: Path, *, tiny: bool) -> None:
    """The model in ``folder``, which appears only when it is complete, with the tokenizer of another one."""
    if folder.exists():
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_model(family(name, tiny=tiny), partial, tokenizer)
    partial.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    write(options.name, options.folder, options.tokenizer, tiny=options.tiny)


if __name__ == "__main__":
    main()
