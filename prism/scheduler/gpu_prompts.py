"""What an engine's prompts cost its answers, and when it may take in the next (:mod:`prism.policy.prefill_turns`)."""

from __future__ import annotations

import math
from typing import Final

from prism.policy.latency_model import TokenTime
from prism.policy.prefill_turns import AnswerLengths, PromptCredit, left_by_step_s, too_slow

_NOBODY: Final = 0.02
"""Answers made too slow: a prompt that makes fewer so harms none."""


class PromptTurns:
    """Of one engine, whose answers stand still while it has prompts to compute. Times are ``now_s`` of one clock."""

    def __init__(self, objective_s: float) -> None:
        """``objective_s``: for the time per token; infinite where nobody minds."""
        self._objective_s = objective_s
        self._steps, self._lengths = TokenTime(), AnswerLengths()
        self._credit, self._strict = PromptCredit(), PromptCredit(kept=0.0)
        self._stalled = False
        self._at_s = self._stood_s = 0.0
        self._step_s = self._answer_s = 1.0
        self._answering, self._age_s = 0, 0.0

    def expect(self, step_s: float, answer_s: float, age_s: float) -> None:
        """What a decode step is expected to take (> 0) where no answer ended lately, how long a request takes, and for
        how long those that are answered have been, on average."""
        self._step_s, self._answer_s, self._age_s = step_s, answer_s, age_s

    def look(self, prompt_tokens: int, answering: int, now_s: float) -> None:
        """The engine has ``prompt_tokens`` to compute and answers so many requests from now on."""
        self._pass_time(now_s)
        self._stalled, self._answering = prompt_tokens > 0 and answering > 0, answering

    def stood_s(self, now_s: float) -> float:
        """For how long answers have stood still in all."""
        return self._stood_s + (now_s - self._at_s if self._stalled else 0.0)

    def learn(self, tokens: int, seconds: float, now_s: float) -> None:
        """An answer of ``tokens`` (>= 1) took ``seconds`` beside the time for which it stood still."""
        self._lengths.note(tokens)
        self._steps.observe(tokens, max(0.0, seconds), now_s)

    def due_s(self, prompts_s: float, patient_until_s: float, now_s: float, *, pressed: bool = False) -> float:
        """From when on a prompt may begin: now or before, later, or (infinite) not before those are computed that it is
        behind. ``prompts_s``: what they and it still take. Until ``patient_until_s`` it spends nothing that is kept for
        those in a hurry; ``pressed``: but where nobody minds."""
        self._pass_time(now_s)
        due_s = self._due_s(self._credit, prompts_s, now_s)
        if now_s >= patient_until_s or (pressed and self._harms_nobody(prompts_s, now_s)):
            return due_s
        return max(due_s, min(patient_until_s, self._due_s(self._strict, prompts_s, now_s)))

    def _harms_nobody(self, prompts_s: float, now_s: float) -> bool:
        step_s = self._expected_s(now_s)
        left_s = left_by_step_s(step_s, self._objective_s)
        stopped_s = prompts_s + left_s - self._strict.left_s  # by those before it as well
        return too_slow(stopped_s, step_s, left_s, self._answering, self._age_s, self._lengths) < _NOBODY

    def _due_s(self, credit: PromptCredit, prompts_s: float, now_s: float) -> float:
        if self._stalled:
            return now_s if prompts_s <= credit.left_s else math.inf
        return credit.due_s(self._expected_s(now_s), self._objective_s) if credit.left_s < 0.0 else now_s

    def _pass_time(self, now_s: float) -> None:
        if self._stalled:
            self._stood_s += now_s - self._at_s
        self._at_s = now_s
        stalled, step_s, answer_s = self._stalled, self._expected_s(now_s), self._answer_s
        left_s = left_by_step_s(step_s, self._objective_s)
        self._credit.pass_time(now_s, stalled=stalled, step_s=step_s, left_s=left_s, answer_s=answer_s)
        self._strict.pass_time(now_s, stalled=stalled, step_s=step_s, left_s=left_s, answer_s=answer_s)

    def _expected_s(self, now_s: float) -> float:
        return self._steps.mean_s(now_s) or self._step_s
