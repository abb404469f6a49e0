"""Prefills are cut evenly, and only where it is of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.live.micro_batches import LEAST_TOKENS, MOST_PARTS, micro_batches


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(1, 9))
def test_parts_are_all_tokens_and_about_even(lengths: list[int], engines: int) -> None:
    parts = micro_batches(lengths, engines)
    assert sum(parts) == sum(lengths)
    assert max(parts) <= 3 * min(parts) + 4
    assert len(parts) == 1 or (2 * min(parts) >= LEAST_TOKENS - 2 and len(parts) <= MOST_PARTS * (engines - 1))


def test_what_is_short_or_runs_in_one_engine_stays_whole() -> None:
    assert micro_batches([2 * LEAST_TOKENS - 1], 2) == [2 * LEAST_TOKENS - 1]
    assert micro_batches([2 * LEAST_TOKENS], 2) == [LEAST_TOKENS, LEAST_TOKENS]
    assert micro_batches([100 * LEAST_TOKENS], 1) == [100 * LEAST_TOKENS]
    assert micro_batches([100 * LEAST_TOKENS], 2) == MOST_PARTS * [100 * LEAST_TOKENS // MOST_PARTS]
    assert len(micro_batches([100 * LEAST_TOKENS], 3)) == 2 * MOST_PARTS


def test_cuts_go_between_requests_that_end_near() -> None:
    assert micro_batches([150, 150, 150, 150], 2) == [150, 150, 150, 150]
    assert micro_batches([130, 170], 2) == [130, 170]
    assert micro_batches([20, 280], 2) == [150, 150]
