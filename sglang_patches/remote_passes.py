"""Batches of several engines go through layers in one pass: their rows lie side by side, so that weights are read once.

::

    a (decodes)            |  4 5 6 7 |   rows of a           projections, norms, MLPs, experts: once, over all rows
    b (a prompt)   |  2 3  |  4 5 6 7 |   rows of a and b     attention: a's rows with a's back end, table and KV,
    one pass       |  2 3  |  4 5 6 7 |                                  then b's with b's

Layers are functions of a row each, but for attention, which has the slots and request table of one engine: it is given
to each batch's own back end. What holds for that, and is asked for: plain KV (:attr:`ForeignRun.shares` of
:mod:`sglang_patches.remote_foreign`), one row a token in what attention gets, and nothing by the row beside q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sglang_patches.kv_guard import UnsupportedModel
from sglang_patches.remote_pieces import State

_NOT_BY_ROW: Final = frozenset({"sinks"})
"""What attention may get beside q, k and v: it is a layer's, whoever the rows belong to."""


@dataclass(slots=True, eq=False)
class Passenger:
    """One batch on its way through pieces [``piece``, ``end``)."""

    backend: Any
    """SGLang's attention back end, with the batch's request table and KV."""
    batch: Any
    """SGLang's ``ForwardBatch``."""
    piece: int
    end: int
    state: State | None

    @property
    def rows(self) -> int:
        return len(self.batch.input_ids)


class _NoPool:
    """Stands where SGLang's layers look for the KV pool: with several there is none that they may write to themselves
    (fused kernels do, for pools of a type that this one is not)."""

    dtype = None

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModel(f"layers that use {name} of the KV pool cannot run for several engines in one pass")


class PassAttention:
    """An attention back end for the rows of all ``passengers``, one after the other."""

    def __init__(self, passengers: Sequence[Passenger]) -> None:
        self._each = [(one.backend, one.batch, one.rows) for one in passengers]
        self._rows = sum(rows for _, _, rows in self._each)
        self.token_to_kv_pool = _NoPool()

    def init_forward_metadata(self, batch: Any) -> None:
        for backend, own, _ in self._each:
            backend.init_forward_metadata(own)

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **named: Any
    ) -> torch.Tensor:
        """``q``, ``k`` and ``v`` are ``[rows, ...]``; so is what comes out. Raises :class:`UnsupportedModel` for a
        layer whose attention needs more than these."""
        if len(q) != self._rows or not named.keys() <= _NOT_BY_ROW or layer.is_cross_attention:
            raise UnsupportedModel(
                f"attention of layer {layer.layer_id} gets {len(q)} rows for {self._rows} tokens, and {sorted(named)}"
            )
        found, at = [], 0
        for backend, own, rows in self._each:
            q_rows, k_rows, v_rows = (None if one is None else one[at : at + rows] for one in (q, k, v))
            found.append(backend.forward(q_rows, k_rows, v_rows, layer, own, save_kv_cache, **named))
            at += rows
        return torch.cat(found)


def shared_batch(batches: Sequence[Any]) -> Any:
    """SGLang's ``ForwardBatch`` of all their rows, as far as layers look at one beside attention: it prefills if any of
    them does, a token of each request that decodes. Rows and slots mean something to their own back ends only. What
    each is, is kept at ``prism_parts`` (:mod:`sglang_patches.pace`)."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    decodes = all(batch.forward_mode.is_decode() for batch in batches)
    seq_lens = _cat(batches, "seq_lens")
    together = ForwardBatch(
        forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        batch_size=sum(batch.batch_size for batch in batches),
        input_ids=_cat(batches, "input_ids"),
        req_pool_indices=_cat(batches, "req_pool_indices"),
        seq_lens=seq_lens,
        out_cache_loc=_cat(batches, "out_cache_loc"),
        seq_lens_sum=sum(int(batch.seq_lens_sum) for batch in batches),
        seq_lens_cpu=_cat(batches, "seq_lens_cpu"),
        orig_seq_lens=seq_lens,
        positions=_cat(batches, "positions"),
        mrope_positions=None if batches[0].mrope_positions is None else _cat(batches, "mrope_positions", dim=1),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        spec_algorithm=batches[0].spec_algorithm,
        num_token_non_padded_cpu=sum(len(batch.input_ids) for batch in batches),
        is_extend_in_batch=not decodes,
        **({} if decodes else _prefill_fields(batches)),
    )
    together.prism_parts = tuple(batches)
    return together


def _cat(batches: Sequence[Any], name: str, dim: int = 0) -> Any:
    return torch.cat([getattr(batch, name) for batch in batches], dim=dim)


def _prefill_fields(batches: Sequence[Any]) -> dict[str, Any]:
    extends, prefixes = list[int](), list[int]()
    for batch in batches:
        decodes = batch.forward_mode.is_decode()
        extend = [1] * batch.batch_size if decodes else [int(n) for n in batch.extend_seq_lens_cpu]
        extends += extend
        prefixes += [int(n) - m for n, m in zip(batch.seq_lens_cpu.tolist(), extend, strict=True)]
    device = batches[0].input_ids.device
    lengths = torch.tensor(extends, dtype=torch.int32, device=device)
    return {
        "extend_num_tokens": sum(extends),
        "extend_seq_lens": lengths,
        "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32, device=device),
        "extend_start_loc": torch.cumsum(lengths, 0) - lengths,
        "extend_prefix_lens_cpu": prefixes,
        "extend_seq_lens_cpu": extends,
        "extend_logprob_start_lens_cpu": list(prefixes),
    }


def in_one_pass(passengers: Sequence[Passenger]) -> Passenger:
    """One for all of them, which stand before the same piece: what is run of it is run of them all when
    :func:`out_of_pass` was told so."""
    if len(passengers) == 1:
        return passengers[0]
    states = [one.state for one in passengers]
    assert len({(one.piece, state is None) for one, state in zip(passengers, states, strict=True)}) == 1
    return Passenger(
        backend=PassAttention(passengers),
        batch=shared_batch([one.batch for one in passengers]),
        piece=passengers[0].piece,
        end=min(one.end for one in passengers),
        state=_side_by_side([state for state in states if state is not None]),
    )


def _side_by_side(states: Sequence[State]) -> State | None:
    if not states:
        return None
    hidden, residuals = [state[0] for state in states], [state[1] for state in states]
    return torch.cat(hidden), None if residuals[0] is None else torch.cat(residuals)


def out_of_pass(together: Passenger, passengers: Sequence[Passenger]) -> None:
    """Each of ``passengers`` stands where ``together`` does, with its own rows of the state."""
    if len(passengers) == 1:
        return
    assert together.state is not None
    counts = [one.rows for one in passengers]
    hidden, residual = together.state
    residuals = [None] * len(counts) if residual is None else residual.split(counts)
    for one, state in zip(passengers, zip(hidden.split(counts), residuals, strict=True), strict=True):
        one.piece, one.state = together.piece, state
