"""Histograms of inter-token gaps: logarithmic bins that merge, so that millions of gaps stay small.

Bin ``i`` holds gaps in ``[SMALLEST_S * GROWTH**i, SMALLEST_S * GROWTH**(i+1))``; shorter gaps are in bin 0. A value
read back is the geometric middle of its bin: off by at most 5%.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

SMALLEST_S: Final = 1e-5
GROWTH: Final = 1.1
_LOG_GROWTH: Final = math.log(GROWTH)


def gap_bin(gap_s: float) -> int:
    """The bin of a gap of ``gap_s`` seconds."""
    if gap_s <= SMALLEST_S:
        return 0
    return int(math.log(gap_s / SMALLEST_S) / _LOG_GROWTH)


def bin_middle_s(index: int) -> float:
    """The gap that stands for all of bin ``index``."""
    return float(SMALLEST_S * GROWTH ** (index + 0.5))


def histogram(gaps_s: Iterable[float]) -> dict[int, int]:
    """Bin -> count."""
    counts: dict[int, int] = {}
    for gap_s in gaps_s:
        index = gap_bin(gap_s)
        counts[index] = counts.get(index, 0) + 1
    return counts


def merge(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum of ``histograms``."""
    total: dict[int, int] = {}
    for counts in histograms:
        for index, count in counts.items():
            total[index] = total.get(index, 0) + count
    return total
