"""Prompts take turns with decoding, so that tokens keep their objective however many prompts there are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.policy.prefill_turns import AnswerLengths, PromptCredit, left_by_step_s, patient_until_s, too_slow

STEP_S, OBJECTIVE_S = 0.02, 0.1


def passed(credit: PromptCredit, now_s: float, stalled: bool, answer_s: float = 0.0) -> float:
    left_s = left_by_step_s(STEP_S, OBJECTIVE_S)
    return credit.pass_time(now_s, stalled=stalled, step_s=STEP_S, left_s=left_s, answer_s=answer_s)


def test_a_step_leaves_most_of_a_loose_objective_and_a_part_of_a_tight_one() -> None:
    assert left_by_step_s(0.02, 0.1) == pytest.approx(0.06)
    assert left_by_step_s(0.07, 0.1) == pytest.approx(0.05)


def test_nobody_waits_where_steps_are_too_slow_without_any_prompt() -> None:
    assert math.isinf(left_by_step_s(0.09, 0.1))
    credit = PromptCredit()
    left_s = left_by_step_s(0.09, 0.1)
    assert math.isinf(credit.pass_time(5.0, stalled=True, step_s=0.09, left_s=left_s, answer_s=1.0))
    assert credit.due_s(0.09, 0.1) == 5.0


def test_what_was_taken_in_advance_is_earned_by_decoding_first() -> None:
    credit = PromptCredit()
    passed(credit, 1.0, stalled=False)
    assert passed(credit, 1.18, stalled=True) == pytest.approx(-0.12)
    due_s = credit.due_s(STEP_S, OBJECTIVE_S)
    assert due_s == pytest.approx(1.18 + 2 * STEP_S)
    assert passed(credit, due_s, stalled=False) == pytest.approx(0.0, abs=1e-9)


def test_credit_is_kept_for_a_part_of_an_answer_and_no_longer() -> None:
    credit = PromptCredit()
    assert passed(credit, 100.0, stalled=False, answer_s=4.0) == pytest.approx(2.0)
    assert passed(credit, 100.5, stalled=True, answer_s=4.0) == pytest.approx(1.5)
    assert passed(credit, 200.0, stalled=False) == pytest.approx(left_by_step_s(STEP_S, OBJECTIVE_S))


def test_nothing_is_kept_for_those_who_can_wait() -> None:
    credit = PromptCredit(kept=0.0)
    assert passed(credit, 100.0, stalled=False, answer_s=4.0) == credit.left_s == left_by_step_s(STEP_S, OBJECTIVE_S)


def test_a_prompt_can_wait_for_a_third_of_its_objective_less_what_is_computed_before_its_token() -> None:
    assert patient_until_s(arrival_s=10.0, slo_ttft_s=4.0, before_s=0.5) == pytest.approx(10.9)


@given(st.lists(st.floats(0.001, 0.5), min_size=1, max_size=60))
def test_however_long_prompts_are_tokens_keep_the_objective(prompts_s: list[float]) -> None:
    """Prompts that begin as soon as they may: over all steps the time per token is what is aimed at, but for what the
    last prompt has taken in advance."""
    credit, now_s, steps = PromptCredit(), 0.0, 0.0
    passed(credit, now_s, stalled=False)
    for prompt_s in prompts_s:
        due_s = credit.due_s(STEP_S, OBJECTIVE_S)
        steps += (due_s - now_s) / STEP_S
        passed(credit, due_s, stalled=False)
        now_s = due_s + prompt_s
        passed(credit, now_s, stalled=True)
    left_s = left_by_step_s(STEP_S, OBJECTIVE_S)
    assert sum(prompts_s) <= left_s * (steps + 1) + prompts_s[-1] + 1e-6


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=200), st.integers(0, 22))
def test_short_answers_are_counted_and_older_ones_fade(tokens: list[int], half_doublings: int) -> None:
    lengths, short = AnswerLengths(), 2.0 ** (half_doublings / 2) * 1.0001
    for one in tokens:
        lengths.note(one)
    weights = [0.98 ** (len(tokens) - 1 - i) for i in range(len(tokens))]
    below = sum(w for w, one in zip(weights, tokens, strict=True) if one < short * 1.4142)
    surely = sum(w for w, one in zip(weights, tokens, strict=True) if one < short)
    total = sum(weights) + 1.0  # and one that may be as long as any
    share = lengths.share_below(short, 0.0)
    assert surely / total <= share <= (below + 1.0) / total + 1e-9
    assert lengths.share_below(short, 5.0) < share


def test_before_any_answer_has_ended_short_ones_are_as_likely_as_long_ones() -> None:
    lengths = AnswerLengths()
    assert lengths.share_below(0.5, 0.0) == 0.0
    assert lengths.share_below(45.0, 0.0) == pytest.approx(0.5, abs=0.05)
    assert lengths.share_below(4000.0, 0.0) == 1.0
    assert lengths.share_below(45.0, 9.0) < 0.06, "nine that run have more"


def test_only_answers_that_are_young_and_short_mind_a_stop() -> None:
    long_ones, short_ones = AnswerLengths(), AnswerLengths()
    for _ in range(200):
        long_ones.note(500)
        short_ones.note(3)
    left_s = left_by_step_s(STEP_S, OBJECTIVE_S)
    stop_s = 10 * left_s
    assert too_slow(stop_s, STEP_S, left_s, 20, 0.1, long_ones) < 0.2
    assert too_slow(stop_s, STEP_S, left_s, 20, 0.1, short_ones) == pytest.approx(20, rel=0.02)
    assert too_slow(stop_s, STEP_S, left_s, 20, 100 * STEP_S, short_ones) == pytest.approx(
        50 / (50 + 1 + 19), rel=0.1
    ), "one is young; as many as fifty are remembered, and nineteen are longer"
    assert too_slow(left_s / 2, STEP_S, left_s, 20, 0.1, short_ones) == 0.0, "a step leaves more"
    assert too_slow(-1.0, STEP_S, left_s, 20, 0.1, short_ones) == 0.0
    assert too_slow(stop_s, STEP_S, math.inf, 20, 0.1, short_ones) == 0.0, "steps are too slow by themselves"
