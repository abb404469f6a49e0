"""Torch in place of kernels for quantised layers computes what they do, and SGLang calls it."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from sglang_patches.quantised_operators import (
    FP8,
    OPERATORS,
    awq_weight,
    leave_order,
    multiply_fp8_blocks,
    multiply_gptq,
    multiply_int8,
    multiply_int8_blocks,
    quantise_tensor,
    quantise_tokens,
    tokens_to_int8,
)
from tests.engine.quantised_models import GROUP, INT8_GROUPS, awq, blocks, gptq, int8_channel
from tests.engine.rig import codec

WEIGHT = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
INPUTS = torch.randn(5, 384, generator=torch.Generator().manual_seed(2))


def close(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    return bool((found - expected).norm() < share * expected.norm())


def test_int8_by_channel() -> None:
    tensors, meant = int8_channel(WEIGHT)
    whole, scales = tokens_to_int8(INPUTS)
    found = multiply_int8(whole, tensors["weight"].t(), scales, tensors["weight_scale"], torch.float32, torch.ones(256))
    assert close(found, (whole.float() * scales) @ meant.t() + 1, 1e-5)
    assert close(found, INPUTS @ WEIGHT.t() + 1, 0.02)


def test_blocks() -> None:
    tensors, meant = blocks(WEIGHT, "scales", 127, torch.int8)
    found = multiply_int8_blocks(INPUTS, tensors["weight"], [GROUP, GROUP], tensors["scales"], bias=torch.ones(256))
    assert close(found, INT8_GROUPS(INPUTS) @ meant.t() + 1, 0.03)  # the kernel cuts inputs off
    tensors, meant = blocks(WEIGHT, "scales", 448, FP8)
    found = multiply_fp8_blocks(INPUTS, tensors["weight"], [GROUP, GROUP], tensors["scales"])
    assert close(found, INPUTS @ meant.t(), 0.05)


@pytest.mark.parametrize("by_activation", [False, True])
def test_gptq(by_activation: bool) -> None:
    """Inputs in the order of groups come from SGLang as a permutation."""
    tensors, meant = gptq(WEIGHT, by_activation=by_activation)
    groups = tensors["g_idx"]
    order = torch.argsort(groups).int() if by_activation else torch.empty(0, dtype=torch.int32)
    leave_order(tensors["qweight"], order, 4)
    for g_idx, shuffled in ((order, True), (groups, False)):
        rest = (tensors["qweight"], tensors["qzeros"], tensors["scales"], g_idx)
        assert close(multiply_gptq(INPUTS, *rest, shuffled, 4), INPUTS @ meant.t(), 1e-4)


def test_awq() -> None:
    tensors, meant = awq(WEIGHT)
    assert close(awq_weight(tensors["qweight"], tensors["scales"], tensors["qzeros"]).float(), meant.t(), 1e-3)


def test_fp8_with_rows_of_padding() -> None:
    out, scale = torch.empty(17, 384, dtype=FP8), torch.zeros(1)
    quantise_tensor(INPUTS, out, scale, False)
    assert close(out[:5].float() * scale, INPUTS, 0.05)
    assert not out[5:].float().any()
    quantise_tensor(INPUTS, out, torch.tensor([0.02]), True)
    assert close(out[:5].float() * 0.02, INPUTS, 0.05)
    scales = torch.empty(17, 1)
    quantise_tokens(INPUTS, out, scales)
    assert close(out[:5].float() * scales[:5], INPUTS, 0.05)


def test_sglang_calls_them_by_these_names() -> None:
    codec()
    for module, functions in OPERATORS.items():
        source = inspect.getsource(importlib.import_module(module))
        for name in functions:
            assert f"{name}(" in source, f"{module} has no {name}"
