"""Kernels of quantised layers that SGLang has for GPUs (and CPUs with AMX) only, in torch, so that its own quantised
layers compute on any CPU.

``M`` tokens, ``K`` inputs, ``N`` outputs. What is quantised to FP8 is ``float8_e4m3fn``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MOST: Final = float(torch.finfo(FP8).max)
INT8_MOST: Final = 127.0
SMALLEST: Final = 1e-10
"""Of the largest number of a token: a scale must not be zero."""
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ has the eight columns of a word."""


def to_fp8(given: Tensor, scale: Tensor) -> Tensor:
    return (given.float() / scale).clamp(-FP8_MOST, FP8_MOST).to(FP8)


def quantise_tensor(given: Tensor, out: Tensor, scale: Tensor, is_static: bool) -> None:
    """``sgl_per_tensor_quant_fp8``: ``given`` [M, K] into the first rows of ``out``, by one ``scale``, which is written
    unless ``is_static``."""
    if not is_static:
        scale.fill_(given.float().abs().amax().clamp(min=SMALLEST) / FP8_MOST)
    _fill(out, to_fp8(given, scale))


def quantise_tokens(given: Tensor, out: Tensor, scales: Tensor) -> None:
    """``sgl_per_token_quant_fp8``: each token by a scale of its own, written into ``scales`` [>= M, 1]."""
    found = given.float().abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / FP8_MOST
    scales.fill_(1.0)[: len(found)] = found
    _fill(out, to_fp8(given, found))


def _fill(out: Tensor, rows: Tensor) -> None:
    """``out`` may have further rows, which are padding."""
    out[: len(rows)] = rows
    out[len(rows) :].view(torch.uint8).zero_()


def quantise_groups(given: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """[M, K] in FP8, and the scales of groups [M, K / group_size]."""
    groups = given.float().unflatten(-1, (-1, group_size))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / FP8_MOST
    return to_fp8(groups, scales).flatten(-2), scales.squeeze(-1)


def tokens_to_int8(x: Tensor, scale_dtype: torch.dtype = torch.float32, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """``per_token_quant_int8``: [..., K] in int8, and the scale of each token [..., 1]."""
    most = x.float().abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return (x.float() * (INT8_MOST / most)).round().to(torch.int8), (most / INT8_MOST).to(scale_dtype)


def multiply_int8(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``int8_scaled_mm``: [M, K] by [K, N], with a scale for each token and each output."""
    whole = torch._int_mm(a.reshape(-1, a.shape[-1]), b)
    out = whole.float() * a_scales.reshape(-1, 1) * b_scales.reshape(1, -1)
    return (out if bias is None else out + bias).to(out_dtype).unflatten(0, a.shape[:-1])


def multiply_fp8_blocks(
    input: Tensor,
    weight: Tensor,
    block_size: Sequence[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``triton_w8a8_block_fp8_linear``: ``weight`` [N, K] with a scale for each block; inputs are quantised here."""
    assert input_scale is None
    quantised, scales = quantise_groups(input, block_size[1])
    whole = quantised.float() * scales.repeat_interleave(block_size[1], -1)
    return _by_blocks(whole, weight, block_size, weight_scale, bias, input.dtype)


def multiply_int8_blocks(
    input: Tensor,
    weight: Tensor,
    block_size: Sequence[int],
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``apply_w8a8_block_int8_linear``: the same in int8, where inputs are cut off towards zero."""
    assert input_scale is None
    groups = input.float().unflatten(-1, (-1, block_size[1]))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / INT8_MOST
    whole = ((groups / scales).clamp(-INT8_MOST - 1, INT8_MOST).trunc() * scales).flatten(-2)
    return _by_blocks(whole, weight, block_size, weight_scale, bias, input.dtype)


def _by_blocks(
    x: Tensor, weight: Tensor, block: Sequence[int], scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    rows, columns = weight.shape
    spread = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return torch.nn.functional.linear(x, weight.float() * spread, None if bias is None else bias.float()).to(dtype)


def unpack(words: Tensor, dim: int, bits: int = 4) -> Tensor:
    """The numbers in 32-bit ``words``, the lowest bits first, along ``dim``."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    found = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return found.flatten(-2).movedim(-1, dim)


def awq_weight(qweight: Tensor, scales: Tensor, qzeros: Tensor, *_: int) -> Tensor:
    """``awq_dequantize``: [K, N], from words of eight columns, and of groups [K / group, N]."""
    numbers, zeros = (_in_order(unpack(words, 1)) for words in (qweight, qzeros))
    group = len(numbers) // len(scales)
    weight = (numbers - zeros.repeat_interleave(group, 0)).float() * scales.float().repeat_interleave(group, 0)
    return weight.to(scales.dtype)


def _in_order(columns: Tensor) -> Tensor:
    return columns.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1)


def leave_order(qweight: Tensor, g_idx: Tensor, bits: int) -> None:
    """``gptq_shuffle`` lays words out for a kernel; :func:`multiply_gptq` reads them as they are."""


def multiply_gptq(
    a: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, shuffled: bool, bits: int
) -> Tensor:
    """``gptq_gemm``: [M, K] by words of K [K * bits / 32, N]; the stored zero points are one less. ``g_idx``: with
    ``shuffled`` the inputs in the order of their groups, or nothing if that is their own order; else the group of
    each."""
    numbers, zeros = unpack(qweight, 0, bits), unpack(qzeros, 1, bits) + 1
    in_order = torch.arange(len(numbers)) // -(-len(numbers) // len(scales))
    groups = in_order
    if g_idx.numel():
        groups = torch.empty_like(in_order).scatter_(0, g_idx.long(), in_order) if shuffled else g_idx.long()
    weight = (numbers - zeros[groups]).float() * scales.float()[groups]
    return (a.float() @ weight).to(a.dtype)


def upcast_mxfp4(tensor: Tensor, scale: Tensor, target_dtype: torch.dtype, axis: int) -> Tensor:
    """``upcast_from_mxfp``, whose kernel Triton's interpreter cannot run."""
    from triton_kernels.numerics_details.mxfp import upcast_from_mxfp_torch

    found: Tensor = upcast_from_mxfp_torch(tensor, scale, target_dtype, axis)
    return found


_LAYERS: Final = "sglang.srt.layers.quantization"
_KERNELS: Final = "sglang.kernels.ops.quantization"
_GPU: Final = "sglang.srt.hardware_backend.gpu.quantization"
OPERATORS: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    f"{_KERNELS}.fp8_kernel": {"sgl_per_tensor_quant_fp8": quantise_tensor, "sgl_per_token_quant_fp8": quantise_tokens},
    f"{_LAYERS}.fp8_utils": {"triton_w8a8_block_fp8_linear": multiply_fp8_blocks},
    f"{_LAYERS}.w8a8_int8": {"per_token_quant_int8": tokens_to_int8, "int8_scaled_mm": multiply_int8},
    f"{_LAYERS}.compressed_tensors.schemes.compressed_tensors_w8a8_int8": {
        "per_token_quant_int8": tokens_to_int8,
        "int8_scaled_mm": multiply_int8,
    },
    f"{_LAYERS}.blockwise_int8": {"apply_w8a8_block_int8_linear": multiply_int8_blocks},
    "triton_kernels.numerics_details.mxfp": {"upcast_from_mxfp": upcast_mxfp4},
    f"{_GPU}.awq_kernels": {"awq_dequantize": awq_weight},
    f"{_GPU}.gptq_kernels": {"gptq_gemm": multiply_gptq, "gptq_shuffle": leave_order},
}
"""Module of SGLang -> the names under which it calls them. Some are there and would call a GPU, others are missing."""


def put_in_place() -> None:
    """For engines on CPUs, in their process, before a model is loaded."""
    for module, functions in OPERATORS.items():
        found = importlib.import_module(module)
        for name, function in functions.items():
            setattr(found, name, function)
