"""What layers take on a device whose speed is declared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.pace import DevicePace, LayerWork

PACE = DevicePace(layer_s=1e-3, prefill_token_s=1e-5, decode_sequence_s=1e-4, decode_kv_token_s=1e-7)


def test_a_decode_step() -> None:
    work = LayerWork(layers=4, sequences=3, kv_tokens=1000)
    assert PACE.seconds(work) == pytest.approx(4 * (1e-3 + 3e-4 + 1e-4))


def test_a_prefill() -> None:
    assert PACE.seconds(LayerWork(layers=2, prefill_tokens=100)) == pytest.approx(2 * (1e-3 + 1e-3))


def test_no_layers_take_nothing() -> None:
    assert PACE.seconds(LayerWork(layers=0, prefill_tokens=100)) == 0.0


def test_a_shard_of_a_layer_takes_its_part() -> None:
    work = LayerWork(layers=4, sequences=3, kv_tokens=1000)
    assert PACE.seconds(work, shards=2) == pytest.approx(PACE.seconds(work) / 2)


@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 9000), st.integers(0, 99))
def test_layers_take_the_same_wherever_they_are_cut(first: int, then: int, tokens: int, sequences: int) -> None:
    def seconds(layers: int) -> float:
        return PACE.seconds(LayerWork(layers=layers, sequences=sequences, kv_tokens=tokens))

    assert seconds(first) + seconds(then) == pytest.approx(seconds(first + then))


def test_words_name_every_number() -> None:
    assert PACE.words.startswith("1 ms a layer, 10 us more for a token of a prefill, 100 us for a sequence")
