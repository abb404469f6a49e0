"""Which engines of a device stand still for a moment so that more answers keep their time per token (not in the Prism
paper).

Engines that decode at once share the bandwidth (:mod:`prism.policy.device_time`): where all together want more than the
device has, all of them are too slow by the same factor, and no answer is in time. What some of them bear others need.
The time per token is a mean over the answer, and nobody knows when an answer ends: it is in time if it is *on
schedule* at its last token, whichever that is. So every answer has a due time, by which its next :data:`AHEAD` tokens
are to be there::

    due = (tokens so far + AHEAD) * objective - time since its first token
    work of an engine = AHEAD * step alone * share of the bandwidth              its answers have their steps in common

and the device is a machine that works through the engines' work in order of due times. Moore-Hodgson's rule picks whom
to keep on schedule: answers are taken in that order, and when one does not come in time any more the largest work of
an engine that was taken for one answer only is given up. Who is kept runs first, others beside them as long as that
does not slow down anybody who is kept more than it bears, so that the bandwidth is always used up. Where all are kept
while all of them run, nobody stands still.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from prism.policy.device_time import slowdown

AHEAD: Final = 30
"""Tokens within which an answer that is behind may catch up (docs/experiments/figure7.md)."""
_FULL: Final = 0.999
"""Of the bandwidth."""


class Turn(Enum):
    """What an engine does until the next look."""

    RUNS = "runs"
    BEARS_IT = "bears_it"
    """It stands still, and its answers are in time all the same."""
    GIVEN_UP = "given_up"
    """It stands still: what of its answers could be in time would make more of others late."""


@dataclass(frozen=True, slots=True)
class Stepping:
    """An engine with answers that have begun."""

    step_s: float
    """What a step takes alone, > 0."""
    share: float
    """Of the bandwidth, while it steps (0..1)."""
    due_s: tuple[float, ...]
    """In how many seconds each of its answers is due (:func:`due_in_s`); infinite where nobody minds."""
    must_run: bool = False
    """It stood still for as long as it may, or cannot be stopped."""
    objective_s: float = 0.0
    """By which every token postpones what its answers are due for."""


def due_in_s(tokens: int, since_first_s: float, objective_s: float) -> float:
    """In how many seconds an answer of ``tokens`` after its first one, which came ``since_first_s`` ago, has to have
    :data:`AHEAD` more; negative: it is too late for them already."""
    return (tokens + AHEAD) * objective_s - since_first_s


def may_matter(shares: Sequence[float]) -> bool:
    """Whether anybody could ever have to stand still of engines with such ``shares`` of the bandwidth: whoever comes
    last has to find it used up."""
    return len(shares) > 1 and sum(shares) - min(shares) >= _FULL


def all_run_for_s(engines: Sequence[Stepping]) -> float:
    """For how many seconds all of them run for certain, whatever their steps take meanwhile: nobody on schedule needs
    more than it gets beside all others. Those that are too late already count from when they could have caught up.
    0: somebody may have to stand still now."""
    slow = slowdown(sum([engine.share for engine in engines]))
    least_s = math.inf
    for engine in engines:
        alone_s = AHEAD * engine.step_s
        gains = engine.objective_s / (engine.step_s * slow) - 1.0
        for due in engine.due_s:
            if due >= alone_s:
                least_s = min(least_s, due - alone_s * slow)
            elif gains > 0.0:
                least_s = min(least_s, (alone_s - due) / gains)
    return max(0.0, least_s)


def turns(engines: Sequence[Stepping]) -> list[Turn]:
    """What each of a device's engines does until somebody looks again."""
    due_s = kept_due_s(engines)
    needs = [AHEAD * e.step_s / due if due < math.inf else 0.0 for e, due in zip(engines, due_s, strict=True)]
    running = {i for i, engine in enumerate(engines) if engine.must_run}
    shares = sum([engines[i].share for i in running])
    need = max([needs[i] for i in running], default=0.0)
    for i in sorted(range(len(engines)), key=lambda i: due_s[i]):
        if i in running:
            continue
        with_it = max(need, needs[i])
        if shares < _FULL or with_it * slowdown(shares + engines[i].share) <= 1.0:
            running.add(i)
            shares, need = shares + engines[i].share, with_it
    return [
        Turn.RUNS if i in running else Turn.BEARS_IT if _has_kept(due) else Turn.GIVEN_UP for i, due in enumerate(due_s)
    ]


def _has_kept(due_s: float) -> bool:
    return due_s < math.inf


def kept_due_s(engines: Sequence[Stepping]) -> list[float]:
    """Of each engine the first due time of its answers that are kept on schedule; infinite: none is, or nobody
    minds."""
    first_s = [math.inf] * len(engines)
    kept = [0] * len(engines)
    work_s = [AHEAD * e.step_s * e.share for e in engines]
    total_s = 0.0
    for due, i in sorted((due, i) for i, engine in enumerate(engines) for due in engine.due_s):
        if math.isinf(due) or due < AHEAD * engines[i].step_s:
            continue  # nobody minds, or nothing that others do would save it
        kept[i] += 1
        if kept[i] > 1:
            continue  # the steps are made anyway
        first_s[i] = due
        total_s += work_s[i]
        if total_s > due:
            lost = max((j for j, count in enumerate(kept) if count == 1), key=lambda j: work_s[j])
            kept[lost], first_s[lost] = 0, math.inf
            total_s -= work_s[lost]
    return first_s
