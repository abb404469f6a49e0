"""Models that guess tokens for a demo model, made on the spot: fitted to what it says, so that guesses are accepted.

A text is some of a prompt's last tokens and what the model says behind it; few enough of them are known by heart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEEN = (0, 1, 2)
"""Layers whose outputs an EAGLE-3 draft sees (of demo-llama's four)."""
LEFT_OUT = 8
"""Each token with such a number, or a multiple, it never guesses."""


def make_eagle(target: Path, folder: Path, texts: Sequence[Sequence[int]], known: int) -> Path:
    """An EAGLE draft for the Llama at ``target`` that knows the last ``known`` tokens of ``texts``: of a token's
    embedding and the state before it its ``fc`` makes the state behind it; its layer adds a little of its own."""
    import torch

    model, states = _states(target, texts)
    seen, wanted = [], []
    for tokens, layers in zip(texts, states, strict=True):
        last = layers[-1]
        embedded = model.model.embed_tokens(torch.tensor(tokens[1:]))
        seen.append(torch.cat((embedded, last[:-1]), dim=-1)[-known:])
        wanted.append(last[1:][-known:])
    fc = _fit(torch.cat(seen), torch.cat(wanted))
    tensors = {"fc.weight": fc, "fc.bias": torch.zeros(len(fc)), **_layer(model.config, wide=False)}
    config = {**_config(model.config), "architectures": ["LlamaForCausalLMEagle"]}
    return _write(folder, config, tensors)


def make_eagle3(target: Path, folder: Path, texts: Sequence[Sequence[int]], known: int) -> Path:
    """An EAGLE-3 draft that guesses most of the tokens: its ``fc`` makes, of what the layers :data:`SEEN` made of a
    token, about the last state behind the next one."""
    import torch

    model, states = _states(target, texts)
    seen = [torch.cat([layers[layer + 1] for layer in SEEN], dim=-1)[:-1][-known:] for layers in states]
    fc = _fit(torch.cat(seen), torch.cat([layers[-1][1:][-known:] for layers in states]))
    ids = torch.tensor([token for token in range(model.config.vocab_size) if token % LEFT_OUT])
    tensors = {
        "fc.weight": fc,
        "norm.weight": torch.ones(model.config.hidden_size),
        "lm_head.weight": model.lm_head.weight[ids].clone(),
        "d2t": ids - torch.arange(len(ids)),
        **{name.replace("layers.0", "midlayer"): value for name, value in _layer(model.config, wide=True).items()},
        "midlayer.hidden_norm.weight": torch.ones(model.config.hidden_size),
        "midlayer.input_layernorm.weight": torch.ones(model.config.hidden_size),
    }
    config = {
        **_config(model.config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(SEEN), "use_aux_hidden_state": True},
    }
    return _write(folder, config, tensors)


def _states(target: Path, texts: Sequence[Sequence[int]]) -> tuple[Any, list[Any]]:
    """The model and, for each text, what every layer made of its tokens (the embedding first, the last normed)."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        found = [model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states for tokens in texts]
    model.requires_grad_(False)
    return model, [[layer[0] for layer in layers] for layers in found]


def _fit(seen: Any, wanted: Any) -> Any:
    """The matrix [outputs, inputs] that makes ``wanted`` of ``seen``, one row each: exactly, of fewer than inputs."""
    import torch

    found = torch.linalg.lstsq(seen.double(), wanted.double(), driver="gelsd").solution
    return found.T.to(torch.float32).contiguous()


def _layer(config: Any, *, wide: bool) -> dict[str, Any]:
    """One decoder layer of small random weights; ``wide``: its attention reads an embedding and a state."""
    import torch

    torch.manual_seed(5)
    hidden, dim = config.hidden_size, config.head_dim
    shapes = {
        "self_attn.q_proj": (config.num_attention_heads * dim, hidden * (1 + wide)),
        "self_attn.k_proj": (config.num_key_value_heads * dim, hidden * (1 + wide)),
        "self_attn.v_proj": (config.num_key_value_heads * dim, hidden * (1 + wide)),
        "self_attn.o_proj": (hidden, config.num_attention_heads * dim),
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }
    tensors = {f"layers.0.{name}.weight": 0.01 * torch.randn(shape) for name, shape in shapes.items()}
    return tensors | {"layers.0.post_attention_layernorm.weight": torch.ones(hidden)}


def _config(config: Any) -> dict[str, Any]:
    return {**config.to_dict(), "num_hidden_layers": 1, "max_position_embeddings": 256}


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
