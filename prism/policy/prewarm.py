"""When a model that is away will be wanted again, as far as its own rhythm and its company tell. Pure.

Not in the Prism paper; the histogram of idle times with a window before its mass is that of "Serverless in the Wild"
(Shahrad et al., USENIX ATC 2020, section 4.2).

::

    last request                                      usual next one
        |-------------------- idle ------------------------|
        |            away                 |<-- window -->|
                                          load here, if memory is free or its holders are not expected
"""

from __future__ import annotations

from collections import deque
from typing import Final

from prism.policy.demand import IdleIntervals

LEAST_CHANCE: Final = 0.2
"""Chance of a request within the window for which a model is loaded ahead into free memory."""
CHANCE_TO_EVICT: Final = 0.5
"""The same where idle models leave for it."""
TIMES_LIKELIER: Final = 4.0
"""So many times as likely as any of those that leave for it must a model be wanted within the window."""
_WINDOW_S: Final = 10.0
_WINDOW_ACTIVATIONS: Final = 10.0
_POOL_WEIGHT: Final = 3.0


def window_s(activation_s: float) -> float:
    """How long before its expected next request a model may be loaded: it holds memory for about so long that others
    could use, and an activation should not be missed by a hair."""
    return max(_WINDOW_S, _WINDOW_ACTIVATIONS * activation_s)


def chance_of_return(idle_s: float, within_s: float, own: IdleIntervals, pool: IdleIntervals) -> float:
    """Chance that a model which has been idle for ``idle_s`` has a request within ``within_s``, by its own idle
    intervals mixed with those of all models as if three of them had been its own, and with one that goes on for ever: a
    single interval is no rhythm. 0 beyond everything ever seen."""
    weight, later = own.longer_than(idle_s)[0], own.longer_than(idle_s + within_s)[0]
    soon = weight - later
    all_weight, all_later = pool.longer_than(idle_s)[0], pool.longer_than(idle_s + within_s)[0]
    if all_weight > 0.0:
        counted = min(_POOL_WEIGHT, all_weight)
        weight, soon = weight + counted, soon + counted * (1.0 - all_later / all_weight)
    return max(0.0, soon) / (weight + 1.0)  # sums of fading weights may differ in their last digit


def due_after_s(idle_s: float, within_s: float, own: IdleIntervals, pool: IdleIntervals) -> float:
    """The shortest idle time, ``idle_s`` at least, from which on a request is expected within ``within_s`` with
    LEAST_CHANCE; infinite when there is none."""
    if chance_of_return(idle_s, within_s, own, pool) >= LEAST_CHANCE:
        return idle_s
    for usual_s in own.usual_beyond(idle_s):
        look_s = max(idle_s, usual_s - 0.5 * within_s)
        if chance_of_return(look_s, within_s, own, pool) >= LEAST_CHANCE:
            return look_s
    return float("inf")


TOGETHER_S: Final = 10.0
"""Models that come back within so long of each other are used together."""
_RECENT: Final = 8
_FOLLOWERS: Final = 16
_FADES: Final = 0.9
_LEAST_BEFORE: Final = 1.5
"""Two earlier returns, faded."""


class Companions:
    """Which models come back soon after which others: chains of models that one program asks, for one. O(1) per return,
    a few hundred bytes per model."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, str]] = deque(maxlen=_RECENT)
        self._returns: dict[str, float] = {}
        self._after: dict[str, dict[str, float]] = {}

    def on_return(self, model: str, now_s: float) -> None:
        """``model`` has its first request after an idle time."""
        for at_s, earlier in self._recent:
            if now_s - at_s <= TOGETHER_S and earlier != model:
                self._count(earlier, model)
        self._recent.append((now_s, model))
        self._returns[model] = self._returns.get(model, 0.0) * _FADES + 1.0
        followers = self._after.get(model, {})
        for other in followers:
            followers[other] *= _FADES

    def _count(self, earlier: str, model: str) -> None:
        followers = self._after.setdefault(earlier, {})
        followers[model] = min(followers.get(model, 0.0) + 1.0, self._returns[earlier])
        if len(followers) > _FOLLOWERS:
            least = min(followers.values())
            del followers[min([name for name, count in followers.items() if count == least])]

    def after(self, model: str) -> list[tuple[str, float]]:
        """Models that usually come back within 10 s of ``model``, with the share of its returns after which they did,
        the likeliest first; the latest ones count more, and two say nothing yet."""
        before = self._returns.get(model, 0.0) - 1.0  # the one that is going on now: nobody can have followed it yet
        if before < _LEAST_BEFORE:
            return []
        followers = self._after.get(model, {}).items()
        likely = [(name, min(1.0, count / before)) for name, count in followers if count / before >= LEAST_CHANCE]
        return sorted(likely, key=lambda s: (-s[1], s[0]))
