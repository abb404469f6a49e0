"""Models with random weights in real shapes, for measuring: what they write means nothing.

    python -m scripts.gpu.models SHAPE DIR

Weights are drawn on the GPU where there is one, and written where they are read fastest: give a folder in memory.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.make_demo_models import make_tokenizer

VOCABULARY: Final = 2048
"""Of the tokenizer; the model's own may be larger."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder, bfloat16."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES: Final = {
    "tiny": Shape(2, 128, 256, 4, 2, 32, VOCABULARY),
    "0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151_936),
    "8b": Shape(32, 4096, 14_336, 32, 8, 128, 128_256),
}


def config_of(shape: Shape) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="bfloat16",
        initializer_range=0.05,
    )


def write(shape: Shape, folder: Path, device: str) -> None:
    """The model in ``folder``, which appears only when it is complete; the same weights for the same ``device``."""
    if folder.exists():
        return
    import torch
    from transformers import AutoModelForCausalLM

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(partial, max_shard_size="4GB")
    make_tokenizer(partial, VOCABULARY, 1)
    partial.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    import torch

    write(SHAPES[options.shape], options.folder, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
