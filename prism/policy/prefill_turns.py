"""When an engine that answers may take in another prompt (not in the Prism paper, whose admission looks at first tokens
only; Sarathi-Serve keeps such a bound by mixed steps).

An engine computes prompts before it decodes. Where prompts come one after the other its answers stand still: a burst
of short prompts, each a step of its own, stops them for as long as it lasts, and nothing in a queue tells of it. So
prompts take turns with decoding. What a decode step leaves of the objective for the time per token is credit, which
prompts spend: over any longer time tokens keep the objective. Credit is kept up to a part of what an answer takes, so
that a burst's first prompts do not wait. Prompts that wait for credit begin together, which is cheaper. Where steps are
too slow without any prompt nobody waits: it is not prompts that break the promise.

What is kept stops short answers for longer than they last. So only prompts in a hurry spend it: one whose first token
is due much later (:func:`patient_until_s`) waits until what every step leaves, of which nothing is kept, is enough.
Where nobody else is on the device and so many prompts wait that the last of them will be in a hurry, the first one is,
too, if no answer is so short that it would mind (:func:`too_slow`, :class:`AnswerLengths`).
"""

from __future__ import annotations

import math
from typing import Final

_AIM: Final = 0.8
"""Part of the objective that is aimed at: who aims at all of it misses it half of the time."""
_LEAST: Final = 0.5
"""Part of its objective that a step leaves at least: what is expected of steps is known to a part, and an engine that
decodes only answers nobody new."""
KEPT: Final = 0.5
"""Credit at most, in parts of the time that an answer takes."""
_PATIENCE: Final = 0.35
"""Part of the objective for its first token for which a prompt waits for others' answers
(docs/experiments/scheduling.md)."""
_FADES: Final = 0.98
"""What an answer counts for when one more has ended: about fifty are remembered."""
_PER_DOUBLING: Final = 2
_LENGTHS: Final = 26
_ANY_BELOW: Final = 22
"""Logarithms of 1 and 2,048 tokens are as far apart: before any answer has ended each length between them is as likely
as twice that."""


class PromptCredit:
    """Of one engine. Seconds throughout; all times are ``now_s`` of one clock that never goes back."""

    __slots__ = ("_at_s", "_credit_s", "_kept")

    def __init__(self, kept: float = KEPT) -> None:
        """``kept``: most credit, in parts of the time that an answer takes; what one step leaves is kept at least."""
        self._credit_s, self._at_s, self._kept = math.inf, 0.0, kept

    def pass_time(self, now_s: float, *, stalled: bool, step_s: float, left_s: float, answer_s: float) -> float:
        """Bring the credit up to now: since the last call answers stood still (``stalled``), or decoded in steps of
        ``step_s``, each of which left ``left_s`` (:func:`left_by_step_s`). What is left; negative: so much was taken in
        advance. ``answer_s``: what an answer takes."""
        past_s, self._at_s = now_s - self._at_s, now_s
        if math.isinf(left_s):
            self._credit_s = math.inf
        else:
            earned_s = -past_s if stalled else past_s * left_s / step_s
            most_s = max(left_s, self._kept * answer_s)
            self._credit_s = min(min(self._credit_s, most_s) + earned_s, most_s)
        return self._credit_s

    @property
    def left_s(self) -> float:
        """As :meth:`pass_time` said last; infinite before."""
        return self._credit_s

    def due_s(self, step_s: float, objective_s: float) -> float:
        """When there is credit again, if answers are decoded until then."""
        if self._credit_s >= 0.0:
            return self._at_s
        return self._at_s - self._credit_s * step_s / left_by_step_s(step_s, objective_s)


def left_by_step_s(step_s: float, objective_s: float) -> float:
    """Seconds that a decode step of ``step_s`` leaves for prompts; infinite where it is too slow by itself, or nobody
    minds."""
    if step_s >= _AIM * objective_s:
        return math.inf
    return max(_AIM * objective_s - step_s, _LEAST * objective_s)


def patient_until_s(arrival_s: float, slo_ttft_s: float, before_s: float) -> float:
    """How long a prompt can wait for others' answers without a risk for its own first token, ``before_s`` (its own
    prefill included) being prefilled before that comes."""
    return arrival_s + _PATIENCE * slo_ttft_s - before_s


class AnswerLengths:
    """How long an engine's answers are, as those tell that have ended: counts by powers of the root of two, in which
    older ones fade."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts, self._total = [0.0] * _LENGTHS, 0.0

    def note(self, tokens: int) -> None:
        """An answer of so many (>= 1) has ended."""
        for i, count in enumerate(self._counts):
            self._counts[i] = count * _FADES
        self._counts[_bucket(tokens)] += 1.0
        self._total = self._total * _FADES + 1.0

    def share_below(self, tokens: float, longer: float) -> float:
        """Part of all answers (0..1) that have no more than ``tokens``, or hardly more; ``longer``: how many run that
        have more by now."""
        if tokens < 1.0:
            return 0.0
        below = _bucket(tokens) + 1
        return (sum(self._counts[:below]) + min(1.0, below / _ANY_BELOW)) / (self._total + 1.0 + longer)


def _bucket(tokens: float) -> int:
    return min(_LENGTHS - 1, int(_PER_DOUBLING * math.log2(tokens)))


def too_slow(stopped_s: float, step_s: float, left_s: float, answering: int, age_s: float, of: AnswerLengths) -> float:
    """How many of ``answering`` answers, on average begun ``age_s`` ago, are expected to miss their objective because
    they stand still for ``stopped_s``: those that are too short for what their steps, of ``step_s``, leave
    (``left_s`` each) to make up for it. Of older ones none is as short."""
    if math.isinf(left_s) or stopped_s <= 0.0:
        return 0.0
    tokens = stopped_s / left_s
    young = answering * (min(1.0, tokens * step_s / (2.0 * age_s)) if age_s > 0.0 else 1.0)
    return young * of.share_below(tokens, answering - young)
