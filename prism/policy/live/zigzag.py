"""ZigZag (BlitzScale 5.2, Figure 16): what an overloaded instance and the one that loads beside it run next.

All batches, waiting and new ones, are the new instance's. It runs them layer by layer as far as it has layers, the
oldest first, and comes back to them when further layers are there. The old instance takes the oldest batch, with all
layers that are left, only when it has nothing else to do::

    new:  b0:0 b1:0 b2:0 b3:0 | layer 1 is there | b2:1 b3:1 b4:0 b4:1 ...
    old:  b0:1...........6 b1:1..........6   b2:2.......6   b3:3....6
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ZigZagWork:
    """Layers [first, end) of one batch."""

    batch: str
    first: int
    end: int


class ZigZagQueue:
    """The new instance's queue. Each side asks for work when it is free and says when it has done it; a batch is with
    one side at a time."""

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise ValueError(f"layers must be at least 1, got {layers}")
        self._layers = layers
        self._loaded = 0
        self._next: dict[str, int] = {}
        """First layer that is left, of every batch that nobody runs or has run, in the order of arrival."""
        self._taken: dict[str, int] = {}

    @property
    def loaded(self) -> int:
        """Layers [0, loaded) are at the new instance."""
        return self._loaded

    def __iter__(self) -> Iterator[str]:
        """Batches that are not finished, the oldest first."""
        return iter(self._next)

    def arrive(self, batch: str) -> None:
        """A batch that nobody has begun. Raises ``ValueError`` when it is here already."""
        if batch in self._next:
            raise ValueError(f"batch {batch} is here already")
        self._next[batch] = 0

    def load(self, loaded: int) -> None:
        """The new instance has layers [0, loaded) now; never fewer than before."""
        if not self._loaded <= loaded <= self._layers:
            raise ValueError(f"loaded must be in [{self._loaded}, {self._layers}], got {loaded}")
        self._loaded = loaded

    def for_new(self) -> ZigZagWork | None:
        """The oldest batch whose next layer is there: that layer. None: nothing can be run now."""
        for batch, layer in self._next.items():
            if layer < self._loaded and batch not in self._taken:
                return self._take(ZigZagWork(batch, layer, layer + 1))
        return None

    def for_old(self) -> ZigZagWork | None:
        """The oldest batch that is not being run: all its layers that are left."""
        for batch, layer in self._next.items():
            if batch not in self._taken:
                return self._take(ZigZagWork(batch, layer, self._layers))
        return None

    def _take(self, work: ZigZagWork) -> ZigZagWork:
        self._taken[work.batch] = work.end
        return work

    def done(self, batch: str) -> bool:
        """What was taken of ``batch`` has been run; whether the batch is finished. Raises ``KeyError`` when nothing of
        it was taken."""
        self._next[batch] = self._taken.pop(batch)
        if self._next[batch] == self._layers:
            del self._next[batch]
            return True
        return False

    def give_back(self, batch: str) -> None:
        """What was taken of ``batch`` is lost (its runner died): it is as it was. Raises ``KeyError`` as above."""
        del self._taken[batch]
