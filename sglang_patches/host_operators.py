"""What SGLang has for GPUs only of two families' layers, in torch: MiniMax-M2's norms of queries and keys, and how
ERNIE-4.5's experts are chosen.

``M`` tokens, ``Q`` and ``K`` the widths of queries and keys on this rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from sglang_patches.quantised import without_kernels


def sum_squares(x1: Tensor, x2: Tensor) -> Tensor:
    """``rms_sumsq_serial``: [M, Q] and [M, K]; the sums of both, one after the other [2 * M]."""
    return torch.cat([x.float().square().sum(-1) for x in (x1, x2)])


def apply_norms(
    x1: Tensor, x2: Tensor, w1: Tensor, w2: Tensor, sum_sq: Tensor, tp_world: int = 1, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """``rms_apply_serial``: both over the root of their mean squares on all ranks, times their weights."""
    sums = sum_sq[: 2 * len(x1)].unflatten(0, (2, -1)).unsqueeze(-1)
    one, two = (
        (x.float() * torch.rsqrt(total / x.shape[-1] / tp_world + eps) * weight.float()).to(x.dtype)
        for x, weight, total in zip((x1, x2), (w1, w2), sums, strict=True)
    )
    return one, two


def flat_bias(original: Callable[..., Any]) -> Callable[..., Any]:
    """``fused_topk_torch_native``, which takes the experts' biases without a dimension for the layer."""

    def choose(*args: Any, correction_bias: Tensor | None = None, **kwargs: Any) -> Any:
        flat = None if correction_bias is None else correction_bias.flatten()
        return original(*args, correction_bias=flat, **kwargs)

    return choose


_MINIMAX: Final = "sglang.srt.models.minimax_m2"
_TOPK: Final = "sglang.srt.layers.moe.topk"


def prepare() -> None:
    """Once per process of an engine on a CPU, before a model is loaded there."""
    if not without_kernels():
        return
    norms: Any = importlib.import_module(_MINIMAX)
    norms.rms_sumsq_serial, norms.rms_apply_serial = sum_squares, apply_norms
    choice: Any = importlib.import_module(_TOPK)
    choice.fused_topk_native = flat_bias(choice.fused_topk_torch_native)
