"""The CPU versions of GPU kernels and the replaced sampler against plain definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.sampling import hash_on_host, request_seed, sample_filtered

Draw = Callable[[torch.Tensor, int, float, float, int, int], list[int]]

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and torch warn of many things when they are imported

MASK = 0xFFFFFFFF


def murmur3(words: list[int]) -> int:
    """MurmurHash3 (32 bits) of 32-bit words, written from its definition."""
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 & MASK
        word = (word << 15 | word >> 17) & MASK
        state ^= word * 0x1B873593 & MASK
        state = (state << 13 | state >> 19) & MASK
        state = (state * 5 + 0xE6546B64) & MASK
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B & MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & MASK
    return state ^ state >> 16


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=4))
def test_hash_equals_its_definition(rows: list[tuple[int, int]]) -> None:
    seeds = torch.tensor([s for s, _ in rows], dtype=torch.int64).to(torch.uint64)
    positions = torch.tensor([p for _, p in rows], dtype=torch.int64)
    found = hash_on_host(pytest.fail, seeds, positions, torch.arange(5)).to(torch.int64).tolist()
    expected = [[murmur3([s & MASK, s >> 32, p & MASK, column]) for column in range(5)] for s, p in rows]
    assert found == expected


class Request:
    """As much of SGLang's request as the seed needs."""

    def __init__(self, rid: str, seed: int | None) -> None:
        self.rid = rid
        self.sampling_params = type("P", (), {"sampling_seed": seed})()


def test_seeds_follow_the_request_not_the_engine() -> None:
    assert request_seed(Request("a", 7)) == 7
    assert request_seed(Request("a", None)) == request_seed(Request("a", None)) != request_seed(Request("b", None))


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Draw:
    """The replaced sampler, with the hash as it is on a machine without a GPU."""
    from sglang.srt.layers import sampler

    monkeypatch.setattr(sampler, "murmur_hash32", lambda *found: hash_on_host(pytest.fail, *found))

    def drawn(probs: torch.Tensor, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> list[int]:
        rows = len(probs)
        ids = sample_filtered(
            probs,
            torch.full((rows,), top_k),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
            min_p > 0.0,
            torch.full((rows,), seed),
            torch.full((rows,), position),
        )
        return [int(token) for token in ids]

    return drawn


def test_rows_without_filters_draw_as_in_a_batch_without_any(draw: Draw) -> None:
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    probs = torch.softmax(torch.randn(20, 300, generator=torch.Generator().manual_seed(0)), dim=-1)
    for position in range(20):
        seeds, positions = torch.full((20,), 11), torch.full((20,), position)
        assert draw(probs, 2**30, 1.0, 0.0, 11, position) == sampling_from_probs_torch(probs, seeds, positions).tolist()


def test_filters_drop_what_they_should(draw: Draw) -> None:
    probs = torch.tensor([[0.05, 0.4, 0.3, 0.2, 0.05]])

    def support(top_k: int, top_p: float, min_p: float) -> set[int]:
        return {draw(probs, top_k, top_p, min_p, 3, position)[0] for position in range(300)}

    assert support(2**30, 1.0, 0.0) == {0, 1, 2, 3, 4}
    assert support(2, 1.0, 0.0) == {1, 2}
    assert support(2**30, 0.75, 0.0) == {1, 2, 3}
    assert support(2**30, 1.0, 0.6) == {1, 2}
