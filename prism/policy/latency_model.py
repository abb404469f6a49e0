"""What the schedulers believe about time: prefill and decoding measured online, and when a refused client should come
back."""

from __future__ import annotations

import math

_PRIOR_S = 0.25
"""The first guess weighs as much as this many seconds of measured prefill."""
_MEMORY_S = 5.0
"""Measured prefill older than about this many busy seconds is forgotten."""


class PrefillSpeed:
    """Prefill speed ``c`` of one engine in tokens/s: a ratio of decaying sums of tokens and busy seconds.

    A ratio of sums stays right when several prompts share one prefill step: the first brings the step's whole time, the
    others bring tokens and no time.
    """

    __slots__ = ("_busy_s", "_tokens")

    def __init__(self, guess_tokens_per_s: float) -> None:
        self._tokens = max(guess_tokens_per_s, 1e-3) * _PRIOR_S
        self._busy_s = _PRIOR_S

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._busy_s

    def observe(self, tokens: int, busy_s: float) -> None:
        """``tokens`` were prefilled in ``busy_s`` seconds of the device."""
        keep = _MEMORY_S / (_MEMORY_S + busy_s)
        self._tokens = self._tokens * keep + tokens
        self._busy_s = max(self._busy_s * keep + busy_s, 1e-9)

    def seconds(self, tokens: int) -> float:
        """Expected seconds of device time to prefill ``tokens``."""
        return tokens * self._busy_s / self._tokens


_ANSWERS_S = 4.0
"""Answers that ended longer ago than this are mostly forgotten; when none has for as long, nothing is known."""


class TokenTime:
    """Mean time of a token after the first, over the answers that ended lately: a ratio of decaying sums, so that long
    answers count for what they are."""

    __slots__ = ("_seconds", "_seen_s", "_tokens")

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._seen_s = float("-inf")

    def observe(self, tokens: int, seconds: float, now_s: float) -> None:
        """An answer ended whose last ``tokens`` (>= 1) took ``seconds``."""
        keep = _ANSWERS_S / (_ANSWERS_S + max(0.0, now_s - self._seen_s)) if self._tokens else 0.0
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
        self._seen_s = now_s

    def mean_s(self, now_s: float) -> float:
        """0 when no answer ended lately."""
        return self._seconds / self._tokens if now_s - self._seen_s <= _ANSWERS_S else 0.0


_BEGINS_S = 10.0
_ANSWER_GUESS_S = 3.0
_LONGEST_FED = 4.0
"""Beyond so many requests at a time an engine is taken to go on for ever."""


class EnginePace:
    """How often requests begin on an engine, and how long they take: how long it will go on."""

    __slots__ = ("_answer_s", "_begins", "_seen_s")

    def __init__(self) -> None:
        self._begins, self._seen_s, self._answer_s = 0.0, 0.0, _ANSWER_GUESS_S

    def note_begin(self, now_s: float) -> None:
        """A request began."""
        self._begins = self._begins * math.exp((self._seen_s - now_s) / _BEGINS_S) + 1.0
        self._seen_s = now_s

    def note_answer(self, seconds: float) -> None:
        """A request ended that took so long."""
        self._answer_s += 0.1 * (seconds - self._answer_s)

    @property
    def answer_s(self) -> float:
        """How long a request takes, on average."""
        return self._answer_s

    def fed(self, now_s: float) -> float:
        """Requests that begin while one runs, the one before aside."""
        begins = self._begins * math.exp((self._seen_s - now_s) / _BEGINS_S)
        return max(0.0, begins - 1.0) / _BEGINS_S * self._answer_s

    def lasts_s(self, rest_s: float, now_s: float) -> float:
        """How long an engine goes on whose requests take ``rest_s`` more: the busy period of a queue with a server for
        everybody."""
        fed = min(self.fed(now_s), _LONGEST_FED)
        return rest_s if fed <= 0.0 else rest_s * math.expm1(fed) / fed


class SharedClock:
    """Seconds of device time that each engine gets while several prefill at once: real time over the number of them.

    The single-machine model of admission adds up execution times, so a speed measured under sharing must not count the
    neighbours' time as its own.
    """

    __slots__ = ("_at_s", "_value_s", "sharers")

    def __init__(self) -> None:
        self._at_s = 0.0
        self._value_s = 0.0
        self.sharers = 0

    def advance(self, now_s: float) -> float:
        """Bring the clock up to now, before ``sharers`` changes; its value."""
        if now_s > self._at_s:
            self._value_s += (now_s - self._at_s) / max(1, self.sharers)
            self._at_s = now_s
        return self._value_s


def retry_after_s(work_s: float, slo_s: float = 0.0, least_s: float = 1.0, most_s: float = 120.0) -> float:
    """When a refused client should come back: when the queued work (seconds of prefill) has shrunk so far that a
    newcomer can be on time. Bounded, because an estimate beyond minutes is worth nothing."""
    return min(max(work_s - slo_s, least_s), most_s)
