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
