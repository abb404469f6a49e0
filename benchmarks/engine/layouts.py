"""Does a model whose attention keeps something else than K and V per token become ready as fast as one of equal size?

    python -m benchmarks.engine.layouts [--rounds 12]

Three tiny models with as many layers and about as many bytes of weights, all dense, all with Triton's attention: plain
attention, latent attention, sliding windows beside full attention. They follow each other in one worker, as in
`benchmarks.engine.activation`, in two pools that take turns: one keeps nothing of a model that leaves, one keeps all
three built. What is told is the ratio of medians in the same run. Goal: at most 1.5. States of Mamba and linear
attention are left out: SGLang constructs them on GPUs only.

Last result: docs/results/engine.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks.demo_models import pool_spec
from benchmarks.engine.activation import run
from scripts.make_demo_models import make_tokenizer
from tests.engine.families import TWO_ROPES, YARN

_LAYERS: Final = 8
_DIMS: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "vocab_size": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "float32",
}
_UNWRITTEN: Final = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Of DeepSeek-V3's configuration: what SGLang reads and Transformers does not write."""
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "plain": ("Llama", {"num_key_value_heads": 4, "intermediate_size": 720}),
    "latent": (
        "DeepseekV3",
        {
            "num_key_value_heads": 8,
            "intermediate_size": 720,
            "q_lora_rank": 96,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": _LAYERS,
            **YARN,
        },
    ),
    "windows": (
        "Mellum",
        {
            "num_key_value_heads": 4,
            "intermediate_size": 720,
            "head_dim": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense"] * _LAYERS,
            **TWO_ROPES,
        },
    ),
}


def make(name: str, folder: Path) -> Path:
    """The model ``name`` with random weights, and a tokenizer."""
    import torch
    import transformers

    kind, options = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(_DIMS | options))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    file = folder / name / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (_UNWRITTEN if name == "latent" else {})))
    make_tokenizer(folder / name, _DIMS["vocab_size"], seed=1)
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of activating models of equal size by what attention keeps.")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prism-layouts-") as folder:
        models = [pool_spec(make(name, Path(folder)), attention_backend="triton") for name in MODELS]
        for side in run(models, options.rounds):
            p50 = {name: statistics.median(times) for name, times in side.warm.items()}
            ratios = ", ".join(f"{name} {p50[name] / p50['plain']:.2f}" for name in p50 if name != "plain")
            print(f"{side.name}, p50 over that of plain attention: {ratios}")


if __name__ == "__main__":
    main()
