"""What an item has in its hands while it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from scripts.gpu.verdicts import Finding, Reading

NEEDS_GPU: Final = "needs a GPU from here on"


class Skip(Exception):
    """The item ends here, and the message says why; raised by :meth:`Run.skip`."""


class Run:
    """One run of one item. What it notes is on disk at once, so that an end by force loses nothing.

    ``dry`` runs have no GPU: the memory items use a driver made of host memory, the engines a virtual device.
    ``scratch`` is a folder in memory that the items of a stage share, also over runs; large files go there.
    """

    def __init__(self, item: str, partial: Path, scratch: Path, *, dry: bool) -> None:
        self.dry, self.scratch = dry, scratch
        self._partial, self._start_s = partial, time.perf_counter()
        self._finding = Finding(item=item)
        self._write()

    def reading(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        goal: float | None = None,
        is_estimate: bool = True,
        limit: float | None = None,
        less_is_better: bool = True,
    ) -> None:
        """Note a number. A dry run's says nothing about a GPU, so it has no goal."""
        self._finding.readings.append(
            Reading(
                name=name,
                value=value,
                unit=unit,
                goal=None if self.dry else goal,
                is_estimate=is_estimate,
                limit=limit,
                less_is_better=less_is_better,
            )
        )
        self._write()

    def remark(self, text: str) -> None:
        """Note something that is neither good nor bad."""
        self._finding.remarks.append(text)
        self._write()

    def check(self, holds: bool, fault: str) -> None:
        """Note ``fault`` unless it ``holds``; the item goes on."""
        if not holds:
            self._finding.faults.append(fault)
            self._write()

    def skip(self, reason: str) -> NoReturn:
        """End the item here. What was noted before stands."""
        raise Skip(reason)

    def needs_gpu(self) -> None:
        """From here on only a GPU will do: ends the item in a dry run."""
        if self.dry:
            self.skip(NEEDS_GPU)

    def end(self, *, skipped: str | None = None, fault: str | None = None) -> None:
        """The last thing to be written."""
        self._finding.skipped, self._finding.is_over = skipped, True
        self._finding.faults += [fault] if fault else []
        self._write()

    def _write(self) -> None:
        self._finding.seconds = time.perf_counter() - self._start_s
        partial = self._partial.with_suffix(".new")
        partial.write_bytes(msgspec.json.encode(self._finding))
        partial.replace(self._partial)
