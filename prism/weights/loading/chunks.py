"""Which leaves of a pack a load still has to take, who has taken which, and which are in place."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prism.policy.load_help import LoadWay, takes_next
from prism.weights.store.resident import ResidentPack

PATIENCE: Final = 4.0
"""A helper that needs so many times what it should is not waited for."""
_LEAST_PATIENCE_S: Final = 0.1


@dataclass
class WayBooks:
    """What one way (all lanes of a link) has taken and brought."""

    taken: deque[range] = field(default_factory=deque)
    """In the order they were taken; not there yet."""
    began_s: float = 0.0
    brought_s: float = 0.0
    brought_bytes: int = 0

    @property
    def bytes_per_s(self) -> float:
        return self.brought_bytes / max(1e-9, self.brought_s - self.began_s) if self.brought_bytes else 0.0


class Chunks:
    """Safe in several threads. ``own`` is the way over the target's own link, whose lanes get everything that nobody
    else brings; ``helpers`` are the others."""

    def __init__(
        self,
        packed: ResidentPack,
        chunk_bytes: int,
        helpers: Sequence[WayBooks] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._packed, self._header, self._clock = packed, packed.header, clock
        self.per_chunk = max(1, chunk_bytes // packed.header.leaf_bytes)
        self.changed = threading.Condition()
        self.done: set[int] = set()
        self.own = WayBooks()
        self.helpers = tuple(helpers)
        self._next = 0
        self._back: deque[range] = deque()
        """Taken by helpers that did not bring them."""

    @property
    def next_leaf(self) -> int:
        """The first that nobody has taken."""
        return self._next

    def take(self) -> range | None:
        """The next leaves for the target's own link: those that have arrived, a chunk of them. Empty: all are taken;
        None: the next one has not arrived in host memory."""
        with self.changed:
            if self._back:
                chunk: range | None = self._back.popleft()
            else:
                chunk = self._arrived()
            return self._taken(self.own, chunk)

    def take_for(self, helper: WayBooks) -> range | None:
        """The next leaves for a helper, None if it takes none now (:func:`prism.policy.load_help.takes_next`)."""
        with self.changed:
            left_bytes = self._header.data_bytes - self._header.leaf_bytes * self._next
            if left_bytes <= 0:
                return None
            nbytes = min(left_bytes, self.per_chunk * self._header.leaf_bytes)
            others = [self._way(books) for books in (self.own, *self.helpers) if books is not helper]
            if not takes_next(nbytes, left_bytes, self._way(helper), others):
                return None
            return self._taken(helper, self._arrived()) or None

    def over_for(self, helper: WayBooks) -> bool:
        """Whether nothing is left for a helper to take or to bring."""
        with self.changed:
            return self._next >= self._header.leaves and not helper.taken

    def keeps(self, way: WayBooks, chunk: range) -> bool:
        """Whether ``chunk`` is still that way's to bring: what is late may have been taken from it."""
        with self.changed:
            return chunk in way.taken

    def brought(self, way: WayBooks, chunk: range) -> None:
        """``chunk`` is in the target."""
        with self.changed:
            if chunk not in way.taken:  # it was late: the own link brings it, too, the same bytes to the same place
                return
            way.taken.remove(chunk)
            way.brought_bytes += self.nbytes(chunk)
            way.brought_s = self._clock()
            self.done.update(chunk)
            self.changed.notify_all()

    def give_back(self, way: WayBooks, chunks: Sequence[range] | None = None) -> None:
        """The way does not bring ``chunks`` (None: nothing more): what of them is still its own is the own link's."""
        with self.changed:
            back = [chunk for chunk in way.taken if chunks is None or chunk in chunks]
            self._back.extend(back)
            for chunk in back:
                way.taken.remove(chunk)
            self.changed.notify_all()

    def take_late(self) -> bool:
        """For an own lane without work: has what helpers are late with be taken by :meth:`take`. False: nothing is
        under way over helpers any more."""
        with self.changed:
            now_s = self._clock()
            for helper in self.helpers:
                if helper.taken and now_s > self._due_s(helper):
                    self._back.extend(helper.taken)
                    helper.taken.clear()
            return bool(self._back) or any(helper.taken for helper in self.helpers)

    def first_byte(self, chunk: range) -> int:
        return self._header.leaf_range(chunk[0])[0]

    def nbytes(self, chunk: range) -> int:
        return self._header.leaf_range(chunk[-1])[1] - self._header.leaf_range(chunk[0])[0]

    def _due_s(self, helper: WayBooks) -> float:
        """When it should have brought something, at the latest."""
        rate = helper.bytes_per_s or self.own.bytes_per_s
        expected_s = sum(map(self.nbytes, helper.taken)) / rate if rate else 0.0
        return max(helper.began_s, helper.brought_s) + max(_LEAST_PATIENCE_S, PATIENCE * expected_s)

    def _way(self, books: WayBooks) -> LoadWay:
        return LoadWay(books.bytes_per_s, sum(map(self.nbytes, books.taken)))

    def _arrived(self) -> range | None:
        start = end = self._next
        limit = min(start + self.per_chunk, self._header.leaves)
        while end < limit and self._packed.has(range(end, end + 1)):
            end += 1
        self._next = end
        return range(start, end) if end > start or start >= limit else None

    def _taken(self, way: WayBooks, chunk: range | None) -> range | None:
        if chunk:
            way.began_s = way.began_s or self._clock()
            way.taken.append(chunk)
        return chunk


def chunk_bytes_of(data_bytes: int, leaf_bytes: int, ways: int, most_bytes: int) -> int:
    """Pieces of a load over several ways: many enough that the ways end together, ``most_bytes`` at most."""
    return max(leaf_bytes, min(most_bytes, data_bytes // (64 * ways))) if ways > 1 else most_bytes
