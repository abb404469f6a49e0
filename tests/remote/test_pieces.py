"""Which piece of a model a parameter belongs to, by names as SGLang has them."""

from __future__ import annotations

import pytest

from prism.remote.pieces import is_apart, layers_of, piece_of

GEMMA = [f"vision_tower.vision_model.encoder.layers.{i}.mlp.fc1.weight" for i in range(27)] + [
    f"language_model.model.layers.{i}.mlp.down_proj.weight" for i in range(4)
]


def test_layers_of_an_encoder_are_not_the_decoders() -> None:
    assert layers_of(GEMMA) == 4
    assert layers_of(f"transformer.h.{i}.mlp.c_fc.bias" for i in range(3)) == 3


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("model.embed_tokens.weight", 0),
        ("language_model.model.layers.0.self_attn.qkv_proj.weight", 1),
        ("model.layers.3.mlp.experts.w13_weight", 4),
        ("model.norm.weight", 5),
        ("lm_head.weight", 5),
        ("vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight", 0),
        ("vision_tower.transformer.layers.1.attention.qkv_proj.weight", 0),
        ("visual.blocks.1.attn.proj.weight", 0),
        ("multi_modal_projector.mm_input_projection_weight", 0),
        ("image_newline", 0),
    ],
)
def test_what_reads_images_is_with_the_embedding(name: str, piece: int) -> None:
    assert piece_of(name, 4) == piece


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.bias", "lm_head.weight", "visual.blocks.1.w"]
)
def test_what_layers_never_look_at(name: str) -> None:
    assert is_apart(name)


@pytest.mark.parametrize("name", ["model.shared_head_norm.weight", "transformer.wpe.weight", "model.altup.scale"])
def test_what_they_might(name: str) -> None:
    """Names that nobody knows: layers wait for everything that is in no layer."""
    assert not is_apart(name)
