"""Attention over KV that is not all there at once: partial softmaxes that are merged exactly.

For the keys seen so far each query has the largest score m, the sum l of exp(score - m) and the sum a of
exp(score - m) * value. Another part of the keys changes them to::

    m' = max(m, m_part)     l' = l * exp(m - m') + l_part * exp(m_part - m')     a' likewise     answer = a / l

(the online softmax of FlashAttention; the order of the parts changes the rounding only). A *sink* is a score of a key
that has no value: m begins with it, and l with 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

_QUERIES: Final = 256
"""So many at a time: what the scores take is bounded by it, the heads and the keys of a part."""


@dataclass(frozen=True, slots=True)
class Looks:
    """How one layer's queries look at keys."""

    scale: float
    before: int = 0
    """Tokens before its own that a query sees; 0: all."""
    cap: float = 0.0
    """Scores are ``cap * tanh(score / cap)``; 0: as they are."""
    sinks: torch.Tensor | None = None
    """A score for each head."""


class SoftmaxMerge:
    """The attention of ``queries`` (tokens x heads x dim) over keys that are given part by part."""

    def __init__(self, queries: torch.Tensor, kv_heads: int, value_dim: int, looks: Looks) -> None:
        tokens, heads, dim = queries.shape
        group = heads // kv_heads
        self._queries = queries.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
        self._looks, self._tokens, self._dtype = looks, tokens, queries.dtype
        shape = (kv_heads, group, tokens)
        self._most = torch.full(shape, -torch.inf, dtype=torch.float32, device=queries.device)
        self._sum = torch.zeros(shape, dtype=torch.float32, device=queries.device)
        self._values = torch.zeros((*shape, value_dim), dtype=torch.float32, device=queries.device)
        if looks.sinks is not None:
            self._most[:] = looks.sinks.float().view(kv_heads, group, 1)
            self._sum.fill_(1.0)

    def take(self, keys: torch.Tensor, values: torch.Tensor, behind: int | None = None) -> None:
        """Another part, tokens x KV heads x dim. The first query's own token comes ``behind`` tokens after the part's
        first, the next one's a token later, and a query sees no later ones; None: it sees all of the part."""
        k, v = keys.permute(1, 2, 0)[:, None], values.permute(1, 0, 2)[:, None]
        for first in range(0, self._tokens, _QUERIES):
            queries = range(first, min(first + _QUERIES, self._tokens))
            seen = range(len(keys)) if behind is None else self._seen(queries, behind, len(keys))
            if not seen:
                continue
            scores = self._scores(queries, k[..., seen.start : seen.stop])
            if behind is not None:
                self._hide(scores, queries, seen, behind)
            self._merge(slice(queries.start, queries.stop), scores, v[:, :, seen.start : seen.stop])

    def _seen(self, queries: range, behind: int, keys: int) -> range:
        """Keys that one of the queries sees."""
        before = self._looks.before
        first = max(0, behind + queries.start - before) if before else 0
        return range(first, min(keys, behind + queries.stop))

    def _scores(self, queries: range, keys: torch.Tensor) -> torch.Tensor:
        looks = self._looks
        found = torch.matmul(self._queries[:, :, queries.start : queries.stop], keys.to(self._dtype)).float()
        found *= looks.scale
        return looks.cap * torch.tanh(found / looks.cap) if looks.cap else found

    def _hide(self, scores: torch.Tensor, queries: range, seen: range, behind: int) -> None:
        """From each query what it does not see."""
        before = self._looks.before
        all_come_before = seen.stop <= behind + queries.start + 1
        if all_come_before and not (before and seen.start < behind + queries.stop - 1 - before):
            return
        own = behind + torch.arange(queries.start, queries.stop, device=scores.device)[:, None]
        keys = torch.arange(seen.start, seen.stop, device=scores.device)[None, :]
        hidden = keys > own
        if before:
            hidden |= keys < own - before
        scores.masked_fill_(hidden, -torch.inf)

    def _merge(self, part: slice, scores: torch.Tensor, values: torch.Tensor) -> None:
        most, total, sums = self._most[:, :, part], self._sum[:, :, part], self._values[:, :, part]
        now = torch.maximum(most, scores.amax(-1))
        base = now.masked_fill(now == -torch.inf, 0.0)  # who has seen nothing yet
        weights = torch.exp(scores - base[..., None])
        fade = torch.exp(most - base)
        total.mul_(fade).add_(weights.sum(-1))
        sums.mul_(fade[..., None]).add_(torch.matmul(weights.to(self._dtype), values.to(self._dtype)).float())
        most.copy_(now)

    def answer(self) -> torch.Tensor:
        """tokens x (heads * value dim), in the queries' type."""
        found = (self._values / self._sum[..., None]).permute(2, 0, 1, 3)
        return found.reshape(self._tokens, -1).to(self._dtype)


def attend_own(merge: SoftmaxMerge, keys: torch.Tensor, values: torch.Tensor, before: int, piece: int) -> None:
    """The keys of the step itself and the ``before`` that precede them; by ``piece`` at a time."""
    for first in range(0, len(keys), piece):
        merge.take(keys[first : first + piece], values[first : first + piece], before - first)
