"""What is known about a model's demand: its sliding-window request rate, what the catalog expects before there is one,
and the distribution of its idle intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping

IDLE_GAP_S = 0.5
"""Shorter gaps between requests are part of being busy: the distributions of idle intervals do not hold them."""
_BUCKETS = 12
_LATELY = 2
"""Buckets, before the one that has begun, that count as lately."""


class SlidingRate:
    """Requests per second over the last ``window_s`` seconds, in O(1) time and memory."""

    __slots__ = ("_bucket", "_counts", "_total", "_width_s")

    def __init__(self, window_s: float) -> None:
        self._width_s = window_s / _BUCKETS
        self._counts: list[int] | None = None  # most models of a large catalog never see a request
        self._bucket = 0
        self._total = 0

    def add(self, count: int, now_s: float) -> None:
        counts = self._advance(now_s)
        counts[self._bucket % _BUCKETS] += count
        self._total += count

    def per_s(self, now_s: float) -> float:
        """The rate over the window that ends now."""
        if self._counts is None:
            return 0.0
        if now_s >= (self._bucket + 1) * self._width_s:
            self._advance(now_s)
        return self._total / (self._width_s * _BUCKETS)

    def lately(self, now_s: float) -> tuple[float, float]:
        """Requests/s of the last moments (a sixth to a quarter of the window), and how many seconds that is."""
        bucket, total = int(now_s // self._width_s), 0
        if self._counts is not None:
            for b in range(bucket - _LATELY, min(bucket, self._bucket) + 1):
                total += self._counts[b % _BUCKETS] if b > self._bucket - _BUCKETS else 0
        window_s = _LATELY * self._width_s + now_s % self._width_s
        return total / window_s, window_s

    def _advance(self, now_s: float) -> list[int]:
        bucket = int(now_s // self._width_s)
        if self._counts is None:
            self._counts, self._bucket = [0] * _BUCKETS, bucket
        if bucket >= self._bucket + _BUCKETS:
            self._counts, self._total, self._bucket = [0] * _BUCKETS, 0, bucket
        elif bucket > self._bucket:
            for old in range(self._bucket + 1, bucket + 1):  # their places belong to a later time now
                self._total -= self._counts[old % _BUCKETS]
                self._counts[old % _BUCKETS] = 0
            self._bucket = bucket
        return self._counts


class ExpectedRates:
    """Requests per second that the catalog expects of models: a prior for the time that no window has seen.

    They stand for that part of a rate's window which lies before the fleet's first request, of whatever model, so that
    one window later measured rates stand alone.
    """

    __slots__ = ("_first_s", "_rates", "_window_s")

    def __init__(self, rates: Mapping[str, float], window_s: float) -> None:
        self._rates, self._window_s = dict(rates), window_s
        self._first_s: float | None = None

    def saw_request(self, now_s: float) -> None:
        """A request came; the first one begins the fading."""
        if self._first_s is None:
            self._first_s = now_s

    @property
    def begun(self) -> bool:
        """The first request has come."""
        return self._first_s is not None

    def per_s(self, model: str, now_s: float, window_s: float | None = None) -> float:
        """What is to be added to the model's measured rate, of ``window_s`` if that is another than usual; 0 for a
        model that is not named."""
        seen_s = 0.0 if self._first_s is None else now_s - self._first_s
        return self._rates.get(model, 0.0) * max(0.0, 1.0 - seen_s / (window_s or self._window_s))


_SHORTEST_S = 0.05
_BINS = 48
"""Bin ``i`` holds intervals of ``_SHORTEST_S * 2 ** (i / 2)`` seconds: up to about eleven days."""
_LONGEST_S = _SHORTEST_S * math.pow(2.0, _BINS / 2)
_THRESHOLDS_S = tuple(dict.fromkeys(max(IDLE_GAP_S, _SHORTEST_S * math.pow(2.0, i / 2)) for i in range(_BINS)))
"""Where bins begin, those of gaps aside: idle times that are looked at as thresholds."""
_DECAY = 0.995
"""What one further interval takes from the weight of all earlier ones."""
_SCALE_LIMIT = 1e6


class IdleIntervals:
    """Histogram of the gaps between a model's busy times, older ones fading; answers how long an idle time will go on.

    Bins are logarithmic (factor sqrt 2); means inside a bin are kept exactly.
    """

    __slots__ = ("_beyond", "_scale", "_sums_s", "_weights")

    def __init__(self) -> None:
        self._scale = 1.0
        self._beyond: dict[int, tuple[float, float]] = {}
        """Weight and length in the bins after bin ``i``, until the next observation: one eviction asks hundreds of
        times."""
        self._weights: list[float] | None = None
        self._sums_s: list[float] | None = None

    def observe(self, interval_s: float) -> None:
        """O(1): the newcomer weighs more instead of everything else less, until the weights are scaled down."""
        if self._weights is None or self._sums_s is None:
            self._weights, self._sums_s = [0.0] * _BINS, [0.0] * _BINS
        self._beyond.clear()
        i = _bin(interval_s)
        self._weights[i] += self._scale
        self._sums_s[i] += interval_s * self._scale
        self._scale /= _DECAY
        if self._scale > _SCALE_LIMIT:
            self._weights = [w / self._scale for w in self._weights]
            self._sums_s = [s / self._scale for s in self._sums_s]
            self._scale = 1.0

    def longer_than(self, idle_s: float) -> tuple[float, float]:
        """Weight (the newest interval has about 1) and summed length of the intervals longer than ``idle_s``.

        The bin of ``idle_s`` itself counts when its mean is longer."""
        return self.longer_in(_bin(idle_s), idle_s)

    def longer_in(self, first: int, idle_s: float) -> tuple[float, float]:
        """:meth:`longer_than`, for callers that know the bin of ``idle_s``: most ask several histograms."""
        if self._weights is None or self._sums_s is None:
            return 0.0, 0.0
        beyond = self._beyond.get(first)
        if beyond is None:
            beyond = self._beyond[first] = sum(self._weights[first + 1 :]), sum(self._sums_s[first + 1 :])
        weight, total_s = beyond
        own = self._weights[first]
        if own > 0.0 and self._sums_s[first] / own > idle_s:
            weight, total_s = weight + own, total_s + self._sums_s[first]
        return weight / self._scale, total_s / self._scale

    def usual_beyond(self, idle_s: float) -> list[float]:
        """Mean lengths of the intervals longer than ``idle_s``, by bin, the shortest first."""
        if self._weights is None or self._sums_s is None:
            return []
        means = (s / w for w, s in zip(self._weights, self._sums_s, strict=True) if w > 0.0)
        return [mean_s for mean_s in means if mean_s > idle_s]


def expected_remaining_s(idle_s: float, own: IdleIntervals, pool: IdleIntervals, pool_weight: float = 3.0) -> float:
    """How much longer an idle time that has lasted ``idle_s`` goes on, on average.

    Mean residual life of the model's own intervals, mixed with those of all models as if ``pool_weight`` of them had
    been its own. Beyond everything ever seen: as long again as it has lasted (the scale-free guess).
    """
    first = _bin(idle_s)
    weight, total_s = own.longer_in(first, idle_s)
    all_weight, all_total_s = pool.longer_in(first, idle_s)
    if all_weight > 0.0:
        weight, total_s = weight + pool_weight, total_s + pool_weight * all_total_s / all_weight
    if weight <= 0.0:
        return max(idle_s, _SHORTEST_S)
    return max(total_s / weight - idle_s, 0.0)


def idle_threshold_s(activation_s: float, own: IdleIntervals, pool: IdleIntervals) -> float:
    """The shortest idle time after which the expected remaining one exceeds twice the activation time; none that is
    shorter than :data:`IDLE_GAP_S`, since a model that has a request several times a second is idle between any two."""
    for idle_s in _THRESHOLDS_S:
        if expected_remaining_s(idle_s, own, pool) > 2.0 * activation_s:
            return idle_s
    return _LONGEST_S


def is_idle_for_long(idle_s: float, activation_s: float, own: IdleIntervals, pool: IdleIntervals) -> bool:
    """Whether ``idle_s`` has reached :func:`idle_threshold_s`, which is not looked for beyond it: an eviction asks this
    of every idle model on its devices, most of which have rested for a moment."""
    for threshold_s in _THRESHOLDS_S:
        if threshold_s > idle_s:
            return False
        if expected_remaining_s(threshold_s, own, pool) > 2.0 * activation_s:
            return True
    return idle_s >= _LONGEST_S


def _bin(interval_s: float) -> int:
    if interval_s <= _SHORTEST_S:
        return 0
    return min(_BINS - 1, int(2.0 * math.log2(interval_s / _SHORTEST_S)))
