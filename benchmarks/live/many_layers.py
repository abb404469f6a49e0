"""A model of many narrow layers: about 62 MB whose real compute is small beside what paced devices declare."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

DEMO: Final = "demo-llama"
LAYERS: Final = 20


def many_layers(models: Path, folder: Path, layers: int = LAYERS) -> Path:
    """demo-llama with more layers, in ``folder``; embedding, first layer and head are a ninth of 20."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig.from_pretrained(models / DEMO)
    config.num_hidden_layers = layers
    shutil.copytree(models / DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
