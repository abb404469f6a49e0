"""Rows of several engines in one pass: attention is each one's own, and the time declared is that of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism.core.pace import DevicePace
from sglang_patches.kv_guard import UnsupportedModel
from sglang_patches.pace import layer_work
from sglang_patches.remote_batches import BatchPart, forward_batch
from sglang_patches.remote_passes import PassAttention, Passenger, in_one_pass, out_of_pass, shared_batch
from tests.engine.rig import codec

LAYER = SimpleNamespace(layer_id=3, is_cross_attention=False)


class Attention:
    """Adds its own number to each query, and keeps what it got."""

    def __init__(self, number: float) -> None:
        self.number, self.seen = number, list[tuple[Any, Any, list[float]]]()

    def init_forward_metadata(self, batch: Any) -> None:
        self.seen.append((batch, None, []))

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool, **named: Any) -> Any:
        assert len(k) == len(v) == len(q) and save_kv_cache
        self.seen.append((batch, named, k[:, 0].tolist()))
        return q + self.number


def batch(lens: Sequence[int], extends: Sequence[int] = ()) -> Any:
    """Requests of these lengths, which prefill so many tokens or decode."""
    codec()
    counts = list(extends) or [1] * len(lens)
    prefixes = [length - count for length, count in zip(lens, counts, strict=True)]
    positions = [at for start, end in zip(prefixes, lens, strict=True) for at in range(start, end)]
    rows = list(range(len(lens)))
    part = BatchPart(rows, list(lens), positions, positions, positions, prefixes if extends else [], list(extends))
    return forward_batch(part, "cpu", None)


def passenger(one: Any, number: float, piece: int = 2, residual: bool = True) -> Passenger:
    rows = torch.arange(len(one.input_ids), dtype=torch.float32)[:, None] + 100 * number
    return Passenger(Attention(number), one, piece, 9, (rows, -rows if residual else None))


@pytest.mark.parametrize("residual", [True, False], ids=["a layer's", "the embedding's"])
def test_each_gets_its_own_rows_back(residual: bool) -> None:
    each = [passenger(batch([5, 9]), 1, residual=residual), passenger(batch([7], [3]), 2, residual=residual)]
    together = in_one_pass(each)
    together.backend.init_forward_metadata(together.batch)
    hidden, before = together.state or (None, None)
    found = together.backend.forward(hidden, hidden, hidden, LAYER, together.batch, sinks=1)
    assert found[:, 0].tolist() == [101.0, 102.0, 202.0, 203.0, 204.0]
    for one in each:
        assert one.backend.seen[0][0] is one.batch and one.backend.seen[1][0] is one.batch
        assert one.backend.seen[1][1] == {"sinks": 1}
    assert each[1].backend.seen[1][2] == [200.0, 201.0, 202.0]
    together.state, together.piece = (found, before), 4
    out_of_pass(together, each)
    assert [one.piece for one in each] == [4, 4]
    states = [one.state for one in each]
    assert [state[0][:, 0].tolist() for state in states if state] == [[101.0, 102.0], [202.0, 203.0, 204.0]]
    assert [state[1] is not None for state in states if state] == [residual, residual]


def test_one_is_alone_in_its_pass() -> None:
    one = passenger(batch([5]), 1)
    assert in_one_pass([one]) is one


def test_what_layers_see_of_all_of_them() -> None:
    decodes = shared_batch([batch([5, 9]), batch([3])])
    assert decodes.forward_mode.is_decode() and decodes.batch_size == 3
    assert decodes.positions.tolist() == [4, 8, 2] and decodes.seq_lens.tolist() == [5, 9, 3]
    mixed = shared_batch([batch([5, 9]), batch([7, 4], [3, 4])])
    assert mixed.forward_mode.is_extend() and mixed.batch_size == 4
    assert mixed.extend_seq_lens_cpu == [1, 1, 3, 4] and mixed.extend_prefix_lens_cpu == [4, 8, 4, 0]
    assert mixed.extend_start_loc.tolist() == [0, 1, 2, 5] and mixed.extend_num_tokens == 9


def test_a_pass_takes_its_layers_time_once_and_that_of_all_its_tokens() -> None:
    pace = DevicePace(layer_s=1.0, prefill_token_s=0.1, decode_sequence_s=0.01, decode_kv_token_s=0.001)
    one, other = batch([5, 9]), batch([7], [3])
    seconds = [pace.seconds(layer_work(each, 4)) for each in (one, other, shared_batch([one, other]))]
    assert seconds == pytest.approx([4 * 1.034, 4 * 1.3, 4 * 1.334])


@pytest.mark.parametrize("rows", [3, 2])
def test_attention_that_needs_more_than_rows_is_refused(rows: int) -> None:
    attention = PassAttention([passenger(batch([5]), 1), passenger(batch([6]), 2)])
    q, named = torch.zeros(rows, 4), {} if rows == 3 else {"k_rope": torch.zeros(2)}
    with pytest.raises(UnsupportedModel, match="layer 3"):
        attention.forward(q, q, q, LAYER, None, **named)


def test_layers_that_write_kv_themselves_are_told_that_they_cannot() -> None:
    pool = PassAttention([]).token_to_kv_pool
    assert pool.dtype is None
    with pytest.raises(UnsupportedModel, match="get_key_buffer"):
        pool.get_key_buffer(0)
