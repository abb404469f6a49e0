"""What a base answers when an adapter is merged into its weights: the reference for adapters that are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """Writes the model of ``base`` with ``adapter`` added to its weights (W + scaling B A) into ``folder``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    weights = load_file(base / "model.safetensors")
    changes = load_file(adapter / "adapter_model.safetensors")
    for name in [n for n in changes if ".lora_A." in n]:
        target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        weights[target] += config["lora_alpha"] / root * changes[name.replace("lora_A", "lora_B")] @ changes[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
