"""Partial softmaxes that are merged give what one softmax over all keys gives."""

from __future__ import annotations

import pytest
import torch

from sglang_patches.long_attention import SoftmaxMerge, attend_own


@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize("loud", [1.0, 30.0])
@pytest.mark.parametrize(
    ("cuts", "before", "tokens", "piece"),
    [([], 0, 1, 8), ([40, 40], 0, 300, 64), ([8, 8, 8], 7, 1, 8), ([5], 12, 9, 3), ([64], 0, 257, 64)],
)
def test_parts_together_are_the_whole(
    cuts: list[int], before: int, tokens: int, piece: int, heads: tuple[int, int], loud: float
) -> None:
    torch.manual_seed(tokens)
    count, kv_heads = heads
    past = sum(cuts)
    queries = loud * torch.randn(tokens, count, 8)
    keys, values = torch.randn(past + before + tokens, kv_heads, 8), torch.randn(past + before + tokens, kv_heads, 5)
    merge = SoftmaxMerge(queries, kv_heads, 5, 0.35)
    attend_own(merge, keys[past:], values[past:], before, piece)
    start = 0
    for cut in cuts:
        merge.take(keys[start : start + cut], values[start : start + cut])
        start += cut
    wanted = whole(queries.double(), keys.double(), values.double(), past + before, 0.35)
    assert torch.allclose(merge.answer().double(), wanted, atol=1e-4)


def whole(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, scale: float) -> torch.Tensor:
    group = queries.shape[1] // keys.shape[1]
    k, v = (part.repeat_interleave(group, 1).permute(1, 0, 2) for part in (keys, values))
    seen = torch.arange(len(keys))[None, :] <= past + torch.arange(len(queries))[:, None]
    found = torch.nn.functional.scaled_dot_product_attention(
        queries.permute(1, 0, 2), k, v, attn_mask=seen, scale=scale
    )
    return found.permute(1, 0, 2).reshape(len(queries), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_answer_has_the_type_of_the_queries(dtype: torch.dtype) -> None:
    merge = SoftmaxMerge(torch.ones(1, 2, 4, dtype=dtype), 1, 3, 1.0)
    merge.take(torch.ones(5, 1, 4, dtype=dtype), torch.ones(5, 1, 3, dtype=dtype))
    assert merge.answer().dtype == dtype
    assert torch.equal(merge.answer(), torch.ones(1, 6, dtype=dtype))
