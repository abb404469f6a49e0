"""Attention over KV that is not all there at once: partial softmaxes that are merged exactly.

For the keys seen so far each query has the largest score m, the sum l of exp(score - m) and the sum a of
exp(score - m) * value. Another part of the keys changes them to::

    m' = max(m, m_part)     l' = l * exp(m - m') + l_part * exp(m_part - m')     a' likewise     answer = a / l

(the online softmax of FlashAttention; the order of the parts changes the rounding only).
"""

from __future__ import annotations

from typing import Final

import torch

_QUERIES: Final = 256
"""So many at a time: what the scores take is bounded by it, the heads and the keys of a part."""


class SoftmaxMerge:
    """The attention of ``queries`` (tokens x heads x dim) over keys that are given part by part."""

    def __init__(self, queries: torch.Tensor, kv_heads: int, value_dim: int, scale: float) -> None:
        tokens, heads, dim = queries.shape
        group = heads // kv_heads
        self._queries = queries.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
        self._scale, self._tokens, self._dtype = scale, tokens, queries.dtype
        shape = (kv_heads, group, tokens)
        self._most = torch.full(shape, -torch.inf, dtype=torch.float32, device=queries.device)
        self._sum = torch.zeros(shape, dtype=torch.float32, device=queries.device)
        self._values = torch.zeros((*shape, value_dim), dtype=torch.float32, device=queries.device)

    def take(self, keys: torch.Tensor, values: torch.Tensor, seen: int | None = None) -> None:
        """Another part, tokens x KV heads x dim. Query t sees its first ``seen + t`` keys; None: all of them. Each
        query must see a key of the first part that is given."""
        k, v = keys.permute(1, 2, 0)[:, None], values.permute(1, 0, 2)[:, None]
        for first in range(0, self._tokens, _QUERIES):
            end = min(first + _QUERIES, self._tokens)
            scores = torch.matmul(self._queries[:, :, first:end], k.to(self._dtype)).float() * self._scale
            if seen is not None and seen + first < len(keys):
                rows = torch.arange(seen + first, seen + end, device=scores.device)
                hidden = torch.arange(len(keys), device=scores.device)[None, :] >= rows[:, None]
                scores.masked_fill_(hidden, -torch.inf)
            self._merge(slice(first, end), scores, v)

    def _merge(self, part: slice, scores: torch.Tensor, values: torch.Tensor) -> None:
        most, total, sums = self._most[:, :, part], self._sum[:, :, part], self._values[:, :, part]
        now = torch.maximum(most, scores.amax(-1))
        weights = torch.exp(scores - now[..., None])
        fade = torch.exp(most - now)
        total.mul_(fade).add_(weights.sum(-1))
        sums.mul_(fade[..., None]).add_(torch.matmul(weights.to(self._dtype), values.to(self._dtype)).float())
        most.copy_(now)

    def answer(self) -> torch.Tensor:
        """tokens x (heads * value dim), in the queries' type."""
        found = (self._values / self._sum[..., None]).permute(2, 0, 1, 3)
        return found.reshape(self._tokens, -1).to(self._dtype)


def attend_own(merge: SoftmaxMerge, keys: torch.Tensor, values: torch.Tensor, before: int, piece: int) -> None:
    """The keys of the step itself and the ``before`` that precede them, of which query t sees ``before + t + 1``; by
    ``piece`` at a time."""
    for first in range(0, len(keys), piece):
        merge.take(keys[first : first + piece], values[first : first + piece], before + 1 - first)
