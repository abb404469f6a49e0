"""A small model whose tokens take much KV."""

from __future__ import annotations

import shutil
from pathlib import Path


def make_wide_model(demo_models: Path, path: Path) -> Path:
    """demo-llama's tokenizer before a narrow model with many KV heads: 64 KiB a token, 32 tokens a page."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(demo_models / "demo-llama", path, ignore=shutil.ignore_patterns("*.safetensors", "*.json.index"))
    config = LlamaConfig.from_pretrained(demo_models / "demo-llama")
    config.update(
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path
