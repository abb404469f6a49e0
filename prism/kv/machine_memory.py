"""Memory that the machine has left: KV outside of engines takes none of what others are about to need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil

_HEADROOM_SHARE: Final = 1 / 32
_MOST_HEADROOM_BYTES: Final = 1 << 30
_FRESH_S: Final = 0.05
"""A look costs as much as copying a small piece."""
_CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """What processes could still take: of the machine, and of each control group (version 2) that this one is in."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups(cgroups, own)])


def _left_in_groups(root: Path, own: Path) -> Iterator[int]:
    try:
        names = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::/")]
    except OSError:
        return
    for name in names:
        folder = root / name.lstrip("/")
        while folder == root or root in folder.parents:
            left = _left_in(folder)
            if left is not None:
                yield left
            folder = folder.parent


def _left_in(folder: Path) -> int | None:
    """None: the group has no bound. File pages that nobody uses go when others need them, and count as left."""
    try:
        bound = (folder / "memory.max").read_text().strip()
        if bound == "max":
            return None
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        unused = int(stats["inactive_file"]) + int(stats["active_file"])
        return int(bound) - int((folder / "memory.current").read_text()) + unused
    except (OSError, KeyError, ValueError):
        return None


def headroom_bytes() -> int:
    """What is to stay available on this machine."""
    return min(_MOST_HEADROOM_BYTES, int(psutil.virtual_memory().total * _HEADROOM_SHARE))


class SpareMemory:
    """What is available beyond ``keep_bytes``, as seen a moment ago; below 0: so much is missing."""

    def __init__(
        self,
        keep_bytes: int,
        available: Callable[[], int] = available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_bytes, self._available, self._clock = keep_bytes, available, clock
        self._spare_bytes = 0
        self._until_s = float("-inf")

    def __call__(self) -> int:
        if self._clock() >= self._until_s:
            self._spare_bytes = self._available() - self._keep_bytes
            self._until_s = self._clock() + _FRESH_S
        return self._spare_bytes

    def changed(self, nbytes: int) -> None:
        """So much more (or, below 0, less) is there than at the last look."""
        self._spare_bytes += nbytes


def spare_memory() -> SpareMemory:
    """This machine's."""
    return SpareMemory(headroom_bytes())
