"""Tiny checkpoints in quantised formats, made on the spot, and what their weights mean: :data:`FORMATS` parametrises
`test_quantised_answers.py`, and `docs/models.md` is made of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tests.engine.families import TOKENIZER, make_model, named

GROUP: Final = 128
"""Inputs that share a scale, and the side of a block."""
FP8: Final = torch.float8_e4m3fn
INPUT_SCALE: Final = 0.02
INTERPRETED: Final = 3.0
"""Where SGLang quantises inputs by Triton's kernels: its interpreter (3.6) is wrong by up to a half for a fortieth of
them. An answer to another prompt is further off."""
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each of a word's eight numbers."""

Quantised = tuple[dict[str, Tensor], Tensor]
"""The tensors of a layer, by what follows the layer's name, and the weight [out, in] that they mean."""


def fp8_tensor(weight: Tensor, *, inputs: bool = False) -> Quantised:
    """By one scale for all layers: SGLang would make those that it joins lose by giving them the largest one's."""
    scale = torch.tensor(2.0**-10)
    whole = (weight / scale).clamp(-448, 448).to(FP8)
    tensors = {"weight": whole, "weight_scale": scale.reshape(1)}
    if inputs:
        tensors["input_scale"] = torch.tensor([INPUT_SCALE])
    return tensors, whole.float() * scale


def fp8_channel(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 448
    whole = (weight / scale).to(FP8)
    return {"weight": whole, "weight_scale": scale}, whole.float() * scale


def int8_channel(weight: Tensor) -> Quantised:
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round().to(torch.int8)
    return {"weight": whole, "weight_scale": scale}, whole.float() * scale


def blocks(weight: Tensor, scales: str, most: float, dtype: torch.dtype) -> Quantised:
    rows, columns = (size // GROUP for size in weight.shape)
    parts = weight.view(rows, GROUP, columns, GROUP)
    scale = parts.abs().amax((1, 3)) / most
    spread = scale[:, None, :, None]
    whole = (parts / spread).round().to(dtype) if dtype is torch.int8 else (parts / spread).to(dtype)
    return {"weight": whole.view_as(weight), scales: scale}, (whole.float() * spread).view_as(weight)


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers 0 to 15 around 8 [out, in], the scale of each group [out, in / GROUP], and what they mean."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).half().float()
    numbers = ((groups / scale[..., None]).round() + 8).clamp(0, 15)
    return numbers.flatten(1).int(), scale, ((numbers - 8) * scale[..., None]).flatten(1)


def pack(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers to a word of 32 bits, the first in its lowest bits."""
    eights = numbers.movedim(dim, -1).unflatten(-1, (-1, 8))
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32)
    for at, column in enumerate(order):
        words |= eights[..., column] << (4 * at)
    return words.movedim(-1, dim).contiguous()


def gptq(weight: Tensor, *, by_activation: bool = False) -> Quantised:
    """``by_activation``: which inputs share a group follows no order."""
    rows, columns = weight.shape
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(5)) if by_activation else None
    sorted_ = weight if order is None else weight[:, order]
    numbers, scale, meant = four_bits(sorted_)
    groups = torch.arange(columns, dtype=torch.int32) // GROUP
    if order is not None:
        back = order.argsort()
        numbers, meant, groups = numbers[:, back], meant[:, back], groups[back]
    zeros = torch.full((columns // GROUP, rows), 7, dtype=torch.int32)  # stored less one
    tensors = {"qweight": pack(numbers.t(), 0), "qzeros": pack(zeros, 1), "scales": scale.t().half(), "g_idx": groups}
    return tensors, meant


def awq(weight: Tensor) -> Quantised:
    rows, columns = weight.shape
    numbers, scale, meant = four_bits(weight)
    zeros = torch.full((columns // GROUP, rows), 8, dtype=torch.int32)
    words = {"qweight": pack(numbers.t(), 1, AWQ_ORDER), "qzeros": pack(zeros, 1, AWQ_ORDER)}
    return {**words, "scales": scale.t().half()}, meant


def as_it_is(weight: Tensor) -> Quantised:
    """Quantised when it is loaded."""
    return {"weight": weight}, weight


def rounded(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """What is left of ``x`` in 8 bits."""
    return (x / scale).clamp(-448, 448).to(FP8).float() * scale if dtype is FP8 else (x / scale).round() * scale


def by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded(x, x.abs().amax(-1, keepdim=True) / (448 if dtype is FP8 else 127), dtype)


def by_group(x: Tensor, dtype: torch.dtype) -> Tensor:
    return by_token(x.unflatten(-1, (-1, GROUP)), dtype).flatten(-2)


FP8_TOKENS: Final = partial(by_token, dtype=FP8)
FP8_GROUPS: Final = partial(by_group, dtype=FP8)
FP8_FIXED: Final = partial(rounded, scale=INPUT_SCALE, dtype=FP8)
INT8_TOKENS: Final = partial(by_token, dtype=torch.int8)
INT8_GROUPS: Final = partial(by_group, dtype=torch.int8)


class Meant(torch.nn.Module):  # type: ignore[misc]
    """A layer as the checkpoint means it: inputs lose what quantising costs."""

    def __init__(self, weight: Tensor, inputs: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.weight, self.inputs = weight, inputs

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x if self.inputs is None else self.inputs(x), self.weight)


@dataclass(frozen=True)
class QuantisedFormat:
    """``said``: `config.json`'s ``quantization_config``; ``inputs``: what it makes of a layer's inputs; ``engine``: the
    model's `engine_args`."""

    words: str
    quantise: Callable[[Tensor], Quantised]
    said: dict[str, Any] | None
    inputs: Callable[[Tensor], Tensor] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    near: float = 0.5
    """By how much the log-probability of an answer's token may be below the likeliest one's, of 16 bits."""
    stock: bool = False
    """SGLang by itself computes it on a CPU: answers are its own. Else they are near what the checkpoint means."""


def _compressed(kind: str, weights: str, inputs: str, *, dynamic: bool = True) -> dict[str, Any]:
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": weights, "dynamic": False},
        "input_activations": {**common, "strategy": inputs, "dynamic": dynamic},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_BLOCKS: Final = {"activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}


FORMATS: Final = {
    "fp8": QuantisedFormat(
        "FP8, a scale for each tensor",
        fp8_tensor,
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        FP8_TOKENS,
        near=INTERPRETED,
    ),
    "fp8-inputs": QuantisedFormat(
        "FP8, with scales of inputs",
        partial(fp8_tensor, inputs=True),
        {"quant_method": "fp8", "activation_scheme": "static"},
        FP8_FIXED,
        near=INTERPRETED,
    ),
    "fp8-blocks": QuantisedFormat(
        "FP8 by blocks",
        partial(blocks, scales="weight_scale_inv", most=448, dtype=FP8),
        {"quant_method": "fp8", **_BLOCKS},
        FP8_GROUPS,
    ),
    "fp8-loading": QuantisedFormat(
        "FP8, made when it is loaded", as_it_is, None, None, {"quantization": "fp8"}, stock=True
    ),
    "w8a8-fp8": QuantisedFormat("w8a8_fp8", fp8_channel, {"quant_method": "w8a8_fp8"}, FP8_TOKENS, stock=True),
    "w8a8-fp8-loading": QuantisedFormat(
        "w8a8_fp8, made when it is loaded", as_it_is, None, None, {"quantization": "w8a8_fp8"}, stock=True
    ),
    "modelopt-fp8": QuantisedFormat(
        "ModelOpt FP8",
        partial(fp8_tensor, inputs=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        FP8_FIXED,
        near=INTERPRETED,
    ),
    "compressed-fp8": QuantisedFormat(
        "compressed-tensors, FP8 by channel", fp8_channel, _compressed("float", "channel", "token"), FP8_TOKENS
    ),
    "compressed-fp8-tensor": QuantisedFormat(
        "compressed-tensors, FP8 by tensor, with scales of inputs",
        partial(fp8_tensor, inputs=True),
        _compressed("float", "tensor", "tensor", dynamic=False),
        FP8_FIXED,
    ),
    "compressed-int8": QuantisedFormat(
        "compressed-tensors, int8 by channel", int8_channel, _compressed("int", "channel", "token"), INT8_TOKENS
    ),
    "w8a8-int8": QuantisedFormat("w8a8_int8", int8_channel, {"quant_method": "w8a8_int8"}, INT8_TOKENS),
    "int8-blocks": QuantisedFormat(
        "int8 by blocks",
        partial(blocks, scales="weight_scale_inv", most=127, dtype=torch.int8),
        {"quant_method": "blockwise_int8", **_BLOCKS},
        INT8_GROUPS,
    ),
    "gptq": QuantisedFormat("GPTQ", gptq, _GPTQ, dtype="float16"),
    "gptq-order": QuantisedFormat(
        "GPTQ in the order of activations",
        partial(gptq, by_activation=True),
        {**_GPTQ, "desc_act": True},
        dtype="float16",
    ),
    "awq": QuantisedFormat(
        "AWQ",
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        dtype="float16",
    ),
}


def make_checkpoint(format_: QuantisedFormat, folder: Path, like: Path) -> Any:
    """A tiny Qwen3 in ``folder`` (SGLang's Llama loses scales of blocks), with the tokenizer of ``like``. Returns
    Hugging Face's model, in float32, computing as the checkpoint means."""
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(11)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).float().eval()
    model.generation_config.eos_token_id = None
    kept = getattr(torch, format_.dtype)
    tensors: dict[str, Tensor] = {}
    for name, parameter in list(model.named_parameters()):
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[name] = parameter.data.to(kept)
            continue
        made, meant = format_.quantise(parameter.data)
        tensors |= {f"{layer}.{n}": t.to(kept) if t is parameter.data else t for n, t in made.items()}
        parent, _, member = layer.rpartition(".")
        setattr(model.get_submodule(parent), member, Meant(meant, format_.inputs))
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    said = config.to_dict() | {"dtype": format_.dtype}
    if format_.said is not None:
        said["quantization_config"] = format_.said
    (folder / "config.json").write_text(json.dumps(said))
    for name in TOKENIZER:
        if (like / name).exists():
            shutil.copy(like / name, folder)
    return model


_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_THIRTY_TWO: Final = 32


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., in] as blocks of 32 in 16 bytes, the exponents of blocks, and what they mean."""
    groups = weight.unflatten(-1, (-1, _THIRTY_TWO))
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1) / _FP4[-1]))
    scaled = groups / torch.exp2(exponent)[..., None]
    sizes = torch.tensor(_FP4)
    nearest = (scaled.abs()[..., None] - sizes).abs().argmin(-1)
    meant = sizes[nearest] * scaled.sign() * torch.exp2(exponent)[..., None]
    codes = nearest + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).byte(), (exponent + 127).byte(), meant.flatten(-2)


def make_gpt_oss(folder: Path, like: Path) -> tuple[Path, Path]:
    """A tiny gpt-oss with experts in MXFP4, and the same with the weights that they mean, in 16 bits."""
    from safetensors.torch import load_file, save_file

    plain, small = make_model(named("GptOss"), folder / "plain", like), folder / "mxfp4"
    shutil.copytree(plain, small)
    meant, stored = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        meant[name] = stored[name] = tensor.bfloat16()
        if name.endswith(("gate_up_proj", "down_proj")):  # of all experts [expert, in, out]
            made = mxfp4(tensor.transpose(1, 2))
            meant[name] = made[2].transpose(1, 2).bfloat16().contiguous()
            del stored[name]
            stored |= {f"{name}_blocks": made[0], f"{name}_scales": made[1]}
    for path, tensors, more in (
        (plain, meant, {}),
        (small, stored, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}),
    ):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        said = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"} | more
        (path / "config.json").write_text(json.dumps(said))
    return small, plain
