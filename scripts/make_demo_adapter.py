"""Create a LoRA adapter with random weights over a demo model, as PEFT would save one: it changes what the model writes
from one noise to another.

    python scripts/make_demo_adapter.py BASE DIR [--rank 8] [--seed 1] [--modules q_proj v_proj ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPREAD = 0.1
"""Standard deviation of the weights, as that of the demo models."""


def make_adapter(
    base: Path,
    folder: Path,
    *,
    rank: int = 8,
    seed: int = 1,
    modules: Sequence[str] = MODULES,
    more: dict[str, object] | None = None,
) -> Path:
    """Writes the adapter over the model in ``base`` into ``folder``, which is returned. ``more``: further settings of
    its configuration."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in sorted(weights.keys()):
                stem = name.removesuffix(".weight")
                if stem.rpartition(".")[2] not in modules:
                    continue
                outputs, inputs = weights.get_slice(name).get_shape()
                for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    matrix = torch.randn(*shape, generator=generator) * SPREAD
                    tensors[f"base_model.model.{stem}.lora_{letter}.weight"] = matrix
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(modules),
        "modules_to_save": None,
        **(more or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description="Create a LoRA adapter with random weights over a demo model.")
    parser.add_argument("base", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    options = parser.parse_args()
    folder = make_adapter(
        options.base, options.directory, rank=options.rank, seed=options.seed, modules=options.modules
    )
    print(f"{folder}: random weights of rank {options.rank} for {', '.join(options.modules)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
