"""Partial softmaxes that are merged give what one softmax over all keys gives."""

from __future__ import annotations

import pytest
import torch

from sglang_patches.long_attention import Looks, SoftmaxMerge, attend_own


@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
@pytest.mark.parametrize("loud", [1.0, 30.0])
@pytest.mark.parametrize(("sees", "cap", "sinks"), [(0, 0.0, False), (1, 0.0, True), (11, 5.0, False), (70, 2.0, True)])
@pytest.mark.parametrize(
    ("cuts", "before", "tokens", "piece"),
    [([], 0, 1, 8), ([40, 40], 0, 300, 64), ([8, 8, 8], 7, 1, 8), ([5], 12, 9, 3), ([64], 0, 257, 64)],
)
def test_parts_together_are_the_whole(
    cuts: list[int],
    before: int,
    tokens: int,
    piece: int,
    heads: tuple[int, int],
    loud: float,
    sees: int,
    cap: float,
    sinks: bool,
) -> None:
    torch.manual_seed(tokens)
    count, kv_heads = heads
    past = sum(cuts)
    queries = loud * torch.randn(tokens, count, 8)
    keys, values = torch.randn(past + before + tokens, kv_heads, 8), torch.randn(past + before + tokens, kv_heads, 5)
    looks = Looks(0.35, sees, cap, torch.randn(count) if sinks else None)
    merge = SoftmaxMerge(queries, kv_heads, 5, looks)
    attend_own(merge, keys[past:], values[past:], before, piece)
    start = 0
    for cut in cuts:
        merge.take(keys[start : start + cut], values[start : start + cut], past + before - start)
        start += cut
    wanted = whole(queries.double(), keys.double(), values.double(), past + before, looks)
    assert torch.allclose(merge.answer().double(), wanted, atol=1e-4)


def whole(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int, looks: Looks) -> torch.Tensor:
    """One softmax over all keys."""
    group = queries.shape[1] // keys.shape[1]
    k, v = (part.repeat_interleave(group, 1).permute(1, 0, 2) for part in (keys, values))
    back = past + torch.arange(len(queries))[:, None] - torch.arange(len(keys))[None, :]
    scores = looks.scale * queries.permute(1, 0, 2) @ k.transpose(1, 2)
    if looks.cap:
        scores = looks.cap * torch.tanh(scores / looks.cap)
    scores.masked_fill_((back < 0) | (back > (looks.before or len(keys))), -torch.inf)
    if looks.sinks is not None:
        sinks = looks.sinks.to(scores.dtype)[:, None, None].expand(-1, len(queries), 1)
        scores, v = torch.cat([scores, sinks], 2), torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    return (scores.softmax(-1) @ v).permute(1, 0, 2).reshape(len(queries), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_answer_has_the_type_of_the_queries(dtype: torch.dtype) -> None:
    merge = SoftmaxMerge(torch.ones(1, 2, 4, dtype=dtype), 1, 3, Looks(1.0))
    merge.take(torch.ones(5, 1, 4, dtype=dtype), torch.ones(5, 1, 3, dtype=dtype))
    assert merge.answer().dtype == dtype
    assert torch.equal(merge.answer(), torch.ones(1, 6, dtype=dtype))
