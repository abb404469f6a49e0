"""What is mapped ahead of use."""

from __future__ import annotations

from prism.policy.kv_ahead import beyond_next_steps, entering_tokens, next_steps_tokens


def test_next_steps_are_whole_pages_of_each_request() -> None:
    assert next_steps_tokens(0) == 0
    assert next_steps_tokens(3) == 48
    assert next_steps_tokens(3, guesses=4, page=16) == 96


def test_answers_count_beyond_the_next_steps_only() -> None:
    assert beyond_next_steps([100, 3], 0.5, 32) == 50 + 2 - 32
    assert beyond_next_steps([10], 0.5, 16) == 0


def test_a_request_enters_with_its_answer_and_a_page_more() -> None:
    assert entering_tokens(200, 64) == 200 + 64 + 2
    assert entering_tokens(200, 64, page=16) == 208 + 64 + 17
