"""The operators of two families on a CPU do what SGLang's do on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm

from sglang_patches.host_operators import apply_norms, flat_bias, sum_squares


def test_norms_of_a_part_count_the_whole() -> None:
    """Two ranks with halves of queries and keys, whose sums are added: as one norm over both halves."""
    torch.manual_seed(1)
    given = [torch.randn(5, width) for width in (12, 8)]
    weights = [torch.randn(width) for width in (12, 8)]
    halves = [[x[:, i * x.shape[1] // 2 : (i + 1) * x.shape[1] // 2] for x in given] for i in (0, 1)]
    parts = [[w[i * len(w) // 2 : (i + 1) * len(w) // 2] for w in weights] for i in (0, 1)]
    both = sum_squares(*halves[0]) + sum_squares(*halves[1])
    found = [apply_norms(*halves[i], *parts[i], sum_sq=both, tp_world=2, eps=1e-6) for i in (0, 1)]
    for at, (x, weight) in enumerate(zip(given, weights, strict=True)):
        joined = torch.cat([found[0][at], found[1][at]], -1)
        torch.testing.assert_close(joined, rms_norm(x, (x.shape[1],), weight, 1e-6))


def test_biases_of_experts_have_one_dimension() -> None:
    seen: list[Any] = []
    choose = flat_bias(lambda *args, **kwargs: seen.append((args, kwargs["correction_bias"])))
    choose("x", correction_bias=torch.ones(1, 4))
    choose("y")
    assert seen[0][1].shape == (4,) and seen[1] == (("y",), None)
