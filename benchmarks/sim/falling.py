"""At which rate does attainment fall below a target? Interpolation between points, and medians over draws of a trace.

A value that lies outside of the rates that were tried is known as a bound only; bounds stay visible to the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Rate:
    """A rate or a ratio of rates. ``side``: -1, it is less than ``value``; 1, it is more; 0, it is ``value``."""

    value: float
    side: int = 0

    def __str__(self) -> str:
        return f"{'<' if self.side < 0 else '>' if self.side > 0 else ''}{self.value:.3g}"

    def over(self, other: Rate) -> Rate:
        """This over ``other``; not a number when both are bounds to the same side, because then nothing is known."""
        side = self.side - other.side
        known = side != 0 or (self.side == 0 and other.side == 0)
        return Rate(self.value / other.value if known else math.nan, max(-1, min(1, side)))


def falls_at(points: Sequence[tuple[float, float]], target: float) -> Rate:
    """The rate at which ``points`` (rate, share), in order of rate, first fall below ``target``. Between two points the
    share falls evenly with the logarithm of the rate."""
    before: tuple[float, float] | None = None
    for rate, share in points:
        if share < target:
            if before is None:
                return Rate(rate, -1)
            part = (before[1] - target) / (before[1] - share)
            return Rate(before[0] * (rate / before[0]) ** part)
        before = rate, share
    if before is None:
        raise ValueError("no points")
    return Rate(before[0], 1)


def middle(values: Sequence[Rate]) -> Rate:
    """The (lower) median of those that are known."""
    known = sorted(value for value in values if not math.isnan(value.value))
    return known[(len(known) - 1) // 2] if known else Rate(math.nan)


def spread(values: Sequence[Rate]) -> str:
    """Median and range, for a table."""
    known = sorted(value for value in values if not math.isnan(value.value))
    if not known:
        return "not known"
    return f"{middle(known)}" if len(known) == 1 else f"{middle(known)} ({known[0]} to {known[-1]})"
