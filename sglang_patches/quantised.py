"""Quantised layers on CPUs without AMX: SGLang's own, over the operators of :mod:`sglang_patches.quantised_operators`.

Two of them assert AMX when they have read a layer; what they do there on GPUs does for these operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Parameter

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.quantised_operators import put_in_place


def without_kernels() -> bool:
    """Whether this process computes on a CPU for which SGLang has no kernels."""
    from sglang.srt.utils import cpu_has_amx_support, is_cpu, is_host_cpu_arm64

    return is_cpu() and not cpu_has_amx_support() and not is_host_cpu_arm64()


def prepare() -> None:
    """Once per process, before a model is loaded there."""
    if without_kernels():
        put_in_place()


def keep_int8(original: Callable[..., None], method: Any, layer: Any) -> None:
    """Around ``W8A8Int8LinearMethod.process_weights_after_loading``."""
    if not without_kernels():
        original(method, layer)
        return
    layer.weight = Parameter(layer.weight.t(), requires_grad=False)
    layer.weight_scale = Parameter(layer.weight_scale.data, requires_grad=False)


def keep_blocks(original: Callable[..., None], method: Any, layer: Any) -> None:
    """Around ``Fp8LinearMethod.process_weights_after_loading_block_quant``."""
    if not without_kernels() or method.use_mxfp8:
        original(method, layer)
        return
    layer.weight = Parameter(layer.weight.data, requires_grad=False)
    layer.weight_scale_inv = Parameter(layer.weight_scale_inv.data, requires_grad=False)


def supported(original: Callable[..., bool], config: Any, min_capability: int, error: bool = True) -> bool:
    """Around ``CompressedTensorsConfig._check_scheme_supported``, which asks the GPU: what has no operators here fails
    by itself."""
    return without_kernels() or original(config, min_capability, error)


_LAYERS = "sglang.srt.layers.quantization"
HOOKS = (
    Hook(
        f"{_LAYERS}.w8a8_int8.W8A8Int8LinearMethod.process_weights_after_loading",
        HookKind.AROUND,
        keep_int8,
        ("self", "layer"),
        "int8 weights on a CPU without AMX",
    ),
    Hook(
        f"{_LAYERS}.fp8.Fp8LinearMethod.process_weights_after_loading_block_quant",
        HookKind.AROUND,
        keep_blocks,
        ("self", "layer"),
        "FP8 blocks on a CPU without AMX",
    ),
    Hook(
        f"{_LAYERS}.compressed_tensors.compressed_tensors.CompressedTensorsConfig._check_scheme_supported",
        HookKind.AROUND,
        supported,
        ("self", "min_capability", "error"),
        "a CPU has no compute capability",
    ),
)
