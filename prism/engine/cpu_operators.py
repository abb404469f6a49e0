"""Operators that SGLang names when it is imported for a CPU and that the library in its wheel does not have.

``sglang.srt.models.qwen3_5`` names them, and the processors of images of the Qwen-VL and MiniCPM-V models import it:
without these names none of them takes images where there is no GPU. They are declared and not implemented: torch
raises ``NotImplementedError`` where one is called. Only Qwen-3.5 calls them, which SGLang has left out of its list of
models by then.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Final

NAMESPACE: Final = "sgl_kernel"
NAMED: Final = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


@cache
def declare_missing() -> None:
    """Once per process, after SGLang's list of models was made (``sglang.srt.models.registry``) and before its
    processors are imported."""
    import torch

    importlib.import_module(NAMESPACE)
    known = getattr(torch.ops, NAMESPACE)
    for name in NAMED:
        if not hasattr(known, name):
            torch.library.define(f"{NAMESPACE}::{name}", "(Tensor any) -> Tensor")
