"""What an item of a stage finds out: readings against what they should be, remarks, and one verdict."""

from __future__ import annotations

from enum import StrEnum

import msgspec

TOLERANCE = 1.25
"""A reading this many times worse than its goal is slow: runs of one item differ by less."""


class Verdict(StrEnum):
    """The worst thing that an item found."""

    OK = "ok"
    SLOW = "slow"
    """A reading misses its goal by more than :data:`TOLERANCE`."""
    WRONG = "wrong"
    """Something does not work: a check failed, the item raised, died or had to be ended."""
    SKIPPED = "skipped"
    """It could not run to its end here; the reason says why."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number. Times in us or s count downwards, everything else upwards, unless ``less_is_better``."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    is_estimate: bool = True
    """The goal was reasoned, not measured."""
    limit: float | None = None
    """The physical limit, measured in the same run."""
    less_is_better: bool = True

    @property
    def is_slow(self) -> bool:
        if self.goal is None:
            return False
        if self.less_is_better:
            return self.value > self.goal * TOLERANCE
        return self.value * TOLERANCE < self.goal

    def line(self) -> str:
        """For people: the number, its goal, the limit."""
        about = []
        if self.goal is not None:
            about.append(f"goal {self.goal:g}{' [est]' if self.is_estimate else ''}")
        if self.limit is not None:
            about.append(f"limit measured here {self.limit:.4g}")
        return f"{self.name} {self.value:.4g} {self.unit}" + (f" ({', '.join(about)})" if about else "")


class Finding(msgspec.Struct, kw_only=True):
    """What one item has found so far; written to disk whenever it grows."""

    item: str
    readings: list[Reading] = []
    remarks: list[str] = []
    faults: list[str] = []
    """What is wrong."""
    skipped: str | None = None
    """Why it did not run to its end."""
    seconds: float = 0.0
    is_over: bool = False
    """False in a file that the item was ended over."""

    @property
    def verdict(self) -> Verdict:
        if self.faults:
            return Verdict.WRONG
        if self.skipped is not None:
            return Verdict.SKIPPED
        return Verdict.SLOW if any(r.is_slow for r in self.readings) else Verdict.OK

    def line(self) -> str:
        """The one line that a stage prints for the item."""
        parts = [*self.faults, *([self.skipped] if self.skipped else []), *(r.line() for r in self.readings)]
        parts += self.remarks if len(parts) < 3 else []
        return f"{self.verdict:8} {self.item:22} {self.seconds:6.1f} s  {'; '.join(parts)}"
