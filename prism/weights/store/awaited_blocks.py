"""Blocks that are corrupt in memory and on disk, while the machine's agent looks for them on other machines
(:mod:`prism.node.mending`). It mends the copy in place; who waits for a block sees it arrive. Where nobody has it, the
agent says so beside the copy, and nobody waits any longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from prism.weights.store.disk_fill import FillLock

MENDING_S: Final = 15.0
"""An engine waits so long for a block after the last one came: the agent looks every 2 s, and asks each machine for at
most another 2 s."""
SAID_S: Final = 5.0
"""What the agent said so lately holds for whoever begins to wait now: while a copy has a corrupt block the agent asks
again every 2 s, and takes it back as soon as somebody has the block."""
LOOK_S: Final = 0.5
"""What is on disk is read again, and what the agent says looked for, so often."""


def say_nobody_has(copy_path: Path, asked: Sequence[str]) -> None:
    """Of the copy's corrupt blocks, as of now; ``asked`` are the machines that do not have them."""
    said = _said(copy_path)
    unread = said.with_suffix(".alone.new")
    unread.write_text(", ".join(asked))
    unread.replace(said)  # a reader sees all of it


def take_back(copy_path: Path) -> None:
    """Somebody may have them."""
    _said(copy_path).unlink(missing_ok=True)


def _said(copy_path: Path) -> Path:
    return copy_path.with_suffix(".alone")


class AwaitedBlocks:
    """What one user of the copy of ``model`` (a fingerprint) at ``copy_path`` waits for. ``patience_s``: for so long
    after ``arrived_bytes`` grew last, and while somebody fills the copy: of a large piece that is fetched again for one
    block nothing counts as arrived before that block; 0: nobody mends here."""

    def __init__(self, copy_path: Path, model: str, patience_s: float, arrived_bytes: Callable[[], int]) -> None:
        self._path, self._patience_s, self._arrived = copy_path, patience_s, arrived_bytes
        self._help = (
            f"`prism store rm {model[:12]}` has it made anew from the model's folder, whose files must be intact"
        )
        self._since: dict[int, float] = {}
        """Of a leaf that was found corrupt: when (Unix time, as files have it)."""
        self._looked_s: dict[int, float] = {}
        self._seen, self._grew_s = -1, 0.0

    def to_be_read_again(self, leaf: int) -> bool:
        """Whether a corrupt leaf is worth another look on disk."""
        now_s = time.monotonic()
        if self._patience_s and now_s < self._looked_s.get(leaf, 0.0) + LOOK_S:
            return False
        self._looked_s[leaf] = now_s
        return True

    def first_time(self, leaf: int) -> bool:
        """Whether nobody asked for the leaf before."""
        return leaf not in self._since

    def why_not(self, leaf: int) -> str | None:
        """Why a leaf that is corrupt on disk, too, will not be mended, and what to do; None: it may be."""
        now_s, since_s = time.time(), self._since.setdefault(leaf, time.time())
        if not self._patience_s:
            return ""
        if (arrived := self._arrived()) != self._seen:
            self._seen, self._grew_s = arrived, now_s
        if (asked := self._nobody_since(since_s)) is not None:
            who = f"none of {asked} has it" if asked else "no other machine is known that has it"
        elif now_s < max(since_s, self._grew_s) + self._patience_s or self._is_filled():
            return None
        else:
            who = f"it did not come from another machine in {self._patience_s:g} s"
        return f"in memory and on disk, {who}; {self._help}"

    def _is_filled(self) -> bool:
        lock = FillLock(self._path)
        free = lock.acquire()
        lock.release()
        return not free

    def _nobody_since(self, since_s: float) -> str | None:
        said = _said(self._path)
        try:
            return said.read_text() if said.stat().st_mtime >= since_s - SAID_S else None
        except FileNotFoundError:
            return None
