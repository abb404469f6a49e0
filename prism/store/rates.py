"""Token-bucket arithmetic shared by both stores."""

from __future__ import annotations

import math

from prism.store.values import RateVerdict


def refill(level: float, per_minute: int, elapsed_s: float) -> float:
    """The bucket's level after ``elapsed_s``; it holds at most ``per_minute``."""
    return min(per_minute, level + max(0.0, elapsed_s) * per_minute / 60)


def verdict(allowed: bool, level: float, amount: int, per_minute: int) -> RateVerdict:
    """What a client is told after an attempt to take ``amount`` that left ``level``."""
    per_s = per_minute / 60
    short = max(0.0, min(amount, per_minute) - level) / per_s if not allowed else 0.0
    return RateVerdict(allowed, per_minute, max(0, math.floor(level)), (per_minute - level) / per_s, short)
