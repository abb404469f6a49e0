"""What runs over a route at once: a batch, or a part of a prefill's tokens, as plain numbers, and SGLang's
``ForwardBatch`` of it.

A part of a prefill is a prefill itself: of each request that it has tokens of, what lies before them is its prefix. It
may be computed when the parts before it have been, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class BatchPart:
    """By request: its row of the request table, its length with the new tokens, and, for a prefill, how many tokens are
    before them and how many they are. By token: its slot, its position, its id, and, for models whose rotary positions
    have three parts (M-RoPE), each of these."""

    rows: list[int]
    seq_lens: list[int]
    out_slots: list[int]
    positions: list[int]
    token_ids: list[int]
    prefix_lens: list[int]
    extend_lens: list[int]
    mrope: list[list[int]] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return not self.extend_lens

    def cut(self, counts: Sequence[int]) -> Iterator[BatchPart]:
        """A prefill in parts of so many tokens; together they are all of them."""
        first = 0
        for count in counts:
            yield self._between(first, first + count)
            first += count

    def _between(self, first: int, end: int) -> BatchPart:
        rows, seq_lens, prefix_lens, extend_lens = [], [], [], []
        at = 0
        for row, prefix, extend in zip(self.rows, self.prefix_lens, self.extend_lens, strict=True):
            begins, ends = max(first, at), min(end, at + extend)
            if begins < ends:
                rows.append(row)
                prefix_lens.append(prefix + begins - at)
                extend_lens.append(ends - begins)
                seq_lens.append(prefix + ends - at)
            at += extend
        tokens = slice(first, end)
        return BatchPart(
            rows=rows,
            seq_lens=seq_lens,
            out_slots=self.out_slots[tokens],
            positions=self.positions[tokens],
            token_ids=self.token_ids[tokens],
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            mrope=[one[tokens] for one in self.mrope],
        )


def whole_batch(ids: Any, positions: Any, batch: Any) -> BatchPart:
    """All of SGLang's ``batch``. One that prefills and decodes at once is a prefill, of a token for who decodes."""
    decodes = bool(batch.forward_mode.is_decode())
    return BatchPart(
        rows=batch.req_pool_indices.tolist(),
        seq_lens=batch.seq_lens.tolist(),
        out_slots=batch.out_cache_loc.tolist(),
        positions=positions.tolist(),
        token_ids=ids.tolist(),
        prefix_lens=[] if decodes else [int(n) for n in batch.extend_prefix_lens_cpu],
        extend_lens=[] if decodes else [int(n) for n in batch.extend_seq_lens_cpu],
        mrope=[] if batch.mrope_positions is None else batch.mrope_positions.tolist(),
    )


def scheduled_batch(batch: Any, mrope: bool) -> BatchPart:
    """All of a ``ScheduleBatch`` of texts that prefills or decodes, with its tokens on the device. ``mrope``: of a
    model whose positions have three parts, which are the same in a text."""
    decodes, ends = bool(batch.forward_mode.is_decode()), batch.seq_lens.tolist()
    prefixes = [] if decodes else [int(n) for n in batch.prefix_lens]
    starts = [end - 1 for end in ends] if decodes else prefixes
    positions = [at for start, end in zip(starts, ends, strict=True) for at in range(start, end)]
    return BatchPart(
        rows=batch.req_pool_indices.tolist(),
        seq_lens=ends,
        out_slots=batch.out_cache_loc.tolist(),
        positions=positions,
        token_ids=batch.input_ids.tolist(),
        prefix_lens=prefixes,
        extend_lens=[] if decodes else [int(n) for n in batch.extend_lens],
        mrope=3 * [positions] if mrope else [],
    )


def forward_batch(part: BatchPart, device: Any, spec_algorithm: Any) -> Any:
    """SGLang's ``ForwardBatch`` of it, as far as decoder layers look at one."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    rows, lengths, out, positions, ids = (
        torch.tensor(values, dtype=torch.int64, device=device)
        for values in (part.rows, part.seq_lens, part.out_slots, part.positions, part.token_ids)
    )
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if part.decodes else ForwardMode.EXTEND,
        batch_size=len(part.rows),
        input_ids=ids,
        req_pool_indices=rows,
        seq_lens=lengths,
        out_cache_loc=out,
        seq_lens_sum=sum(part.seq_lens),
        seq_lens_cpu=lengths.cpu(),
        orig_seq_lens=lengths,
        positions=positions,
        mrope_positions=torch.tensor(part.mrope, dtype=torch.int64, device=device) if part.mrope else None,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=spec_algorithm,
        num_token_non_padded_cpu=len(part.token_ids),
        is_extend_in_batch=not part.decodes,
        **({} if part.decodes else _prefill_fields(part, device)),
    )


def _prefill_fields(part: BatchPart, device: Any) -> dict[str, Any]:
    extend = torch.tensor(part.extend_lens, dtype=torch.int32, device=device)
    return {
        "extend_num_tokens": len(part.token_ids),
        "extend_seq_lens": extend,
        "extend_prefix_lens": torch.tensor(part.prefix_lens, dtype=torch.int32, device=device),
        "extend_start_loc": torch.cumsum(extend, 0) - extend,
        "extend_prefix_lens_cpu": list(part.prefix_lens),
        "extend_seq_lens_cpu": list(part.extend_lens),
        "extend_logprob_start_lens_cpu": list(part.prefix_lens),
    }
