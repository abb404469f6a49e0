"""Pieces of KV in memory that other devices of the machine lend: AQUA's tensors (its section 6), by content.

A lender's memory is this process's own, charged to the lender's account as *lent*: whoever of the two dies leaves
nothing behind. Between two steps the engine answers for what the lender wants back (:meth:`LentShelf.answer`): pieces
go to another place, least recently used first, and their pages back.

::

    region on the lender   | piece | piece |   free   | piece |  free ...     pages under a part of a piece are there
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from prism import memory
from prism.kv.pacing import LenderPace, LinkPace
from prism.kv.piece_file import MemoryBytes
from prism.memory.errors import DeviceMemoryError, OutOfMemory
from prism.memory.rows import Packed

_ALIGN_BYTES: Final = 4096
Key = tuple[str, str]
"""Space and file name of a piece."""


_NAME_BYTES: Final = 63
"""Of an owner's name in an account."""


def borrower_name(worker: str, model: str) -> str:
    """The owner in a lender's account that holds KV of ``model`` for the engine ``worker``."""
    return f"{worker}/{model}".encode()[:_NAME_BYTES].decode(errors="ignore")


_LONG: Final = "-long"


def long_borrower_name(worker: str, model: str) -> str:
    """The same for prompts of ``model`` that are larger than their device."""
    return borrower_name(f"{worker}{_LONG}", model)


def is_long_borrower(owner: str) -> bool:
    """Whether such an owner holds KV of a prompt that is larger than its device."""
    worker, _, model = owner.partition("/")
    return bool(model) and worker.endswith(_LONG)


def borrower_of(owner: str) -> str:
    """Whose KV such an owner holds: the model (of a very long name, its beginning)."""
    return owner.partition("/")[2] or owner


class FreeRanges:
    """Which bytes of a range are free: first fit, neighbours joined."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """The first byte of a free run that is long enough; None if there is none."""
        for i, (first, end) in enumerate(self._free):
            if end - first >= nbytes:
                self._free[i : i + 1] = [(first + nbytes, end)] if end - first > nbytes else []
                return first
        return None

    def give(self, first: int, nbytes: int) -> tuple[int, int]:
        """Free again; returns the free run that holds it now."""
        end = first + nbytes
        i = bisect_left(self._free, (first, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == first:
            first = self._free.pop(i - 1)[0]
        insort(self._free, (first, end))
        return first, end


@dataclass(slots=True)
class _Lent:
    first: int
    aligned_bytes: int
    nbytes: int
    readers: int = 0
    leaves: bool = False
    """It is somewhere else by now: the last reader drops it."""
    arrives: bool = False
    """It is being written: nobody reads it."""

    @property
    def readable(self) -> bool:
        return not (self.leaves or self.arrives)


class Lender:
    """What one device lends to this process. Not for several threads; :class:`LentShelf` has the lock."""

    def __init__(self, device: memory.Device, name: str, bytes_per_s: float, pace: LenderPace | None = None) -> None:
        """``bytes_per_s``: at which copies to and from it go; ``pace`` keeps to it (none: this process's alone)."""
        self.device, self.bytes_per_s, self.pace = device, bytes_per_s, pace or LinkPace(bytes_per_s)
        self.owner = device.register(name)
        self._region = self.owner.lent_region(2 * device.capacity_bytes)
        self._bytes: Packed = np.from_dlpack(self._region.memory())  # type: ignore[arg-type, assignment]
        self._ranges = FreeRanges(self._region.nbytes)
        self.pieces: OrderedDict[Key, _Lent] = OrderedDict()
        """The one used last at the end."""

    @property
    def lent_bytes(self) -> int:
        return self.owner.held("lent")

    def take(self, key: Key, nbytes: int) -> MemoryBytes | None:
        """Memory for a piece; None when the device does not lend so much more now."""
        aligned = -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        first = self._ranges.take(aligned)
        if first is None:
            return None
        try:
            self._region.commit(aligned, offset_bytes=first)
        except OutOfMemory:
            self._give(first, aligned)
            return None
        self.pieces[key] = _Lent(first, aligned, nbytes)
        return MemoryBytes(self._bytes[first : first + nbytes])

    def place(self, key: Key) -> MemoryBytes:
        lent = self.pieces[key]
        return MemoryBytes(self._bytes[lent.first : lent.first + lent.nbytes])

    def drop(self, key: Key) -> None:
        lent = self.pieces.pop(key)
        self._give(lent.first, lent.aligned_bytes)

    def _give(self, first: int, nbytes: int) -> None:
        run_first, run_end = self._ranges.give(first, nbytes)
        page = self.owner.page_bytes
        begin, end = max(run_first, first // page * page), min(run_end, -(-(first + nbytes) // page) * page)
        if end > begin:
            self._region.decommit(end - begin, offset_bytes=begin)

    def close(self) -> None:
        self.pieces.clear()
        if isinstance(self.pace, LenderPace):
            self.pace.close()
        self.owner.close()


Elsewhere = Callable[[Key, Packed], None]
"""Puts a piece somewhere else, or does not: it is dropped either way."""


class LentShelf:
    """Pieces on all lenders. One lender while it has enough, the fastest first (AQUA 5), unless who puts a piece asks
    for one. Safe in several threads."""

    def __init__(self, lenders: list[Lender]) -> None:
        self._lenders = sorted(lenders, key=lambda lender: -lender.bytes_per_s)
        self._lock = threading.Lock()

    @property
    def bytes_per_s(self) -> float:
        """Rate of the fastest link; 0: there is no lender."""
        return max((lender.bytes_per_s for lender in self._lenders), default=0.0)

    @property
    def lenders(self) -> tuple[Lender, ...]:
        """The fastest first."""
        return tuple(self._lenders)

    @property
    def offered_bytes(self) -> int:
        """What lenders would lend beside what they have lent."""
        return sum(lender.device.offered_bytes() for lender in self._lenders)

    @property
    def held_bytes(self) -> int:
        """What they have lent here."""
        return sum(lender.lent_bytes for lender in self._lenders)

    def has(self, key: Key) -> bool:
        with self._lock:
            return any(key in lender.pieces for lender in self._lenders)

    def put(
        self, key: Key, nbytes: int, write: Callable[[MemoryBytes, LinkPace], None], first: Lender | None = None
    ) -> bool:
        """Have ``write`` write a piece of ``nbytes``, at ``first`` if that lends so much. False when nobody does.
        Raises what ``write`` raises."""
        with self._lock:
            if any(key in lender.pieces for lender in self._lenders):
                return True
            for lender in sorted(self._lenders, key=lambda lender: lender is not first):
                if lender.owner.pressure() == 0 and (place := lender.take(key, nbytes)) is not None:
                    lender.pieces[key].readers += 1
                    break
            else:
                return False
        written = False
        try:
            write(place, lender.pace)
            written = True
        finally:
            with self._lock:
                lender.pieces[key].readers -= 1
                if not written:
                    lender.drop(key)
        return True

    @contextmanager
    def opened(self, key: Key) -> Iterator[tuple[MemoryBytes, LinkPace] | None]:
        """The piece, which stays while it is open and counts as used now; None if it is not here."""
        with self._lock:
            lender = next((x for x in self._lenders if key in x.pieces and x.pieces[key].readable), None)
            if lender is not None:
                lender.pieces.move_to_end(key)
                lender.pieces[key].readers += 1
        if lender is None:
            yield None
            return
        try:
            yield lender.place(key), lender.pace
        finally:
            with self._lock:
                self._close(lender, key)

    def _close(self, lender: Lender, key: Key) -> None:
        lent = lender.pieces[key]
        lent.readers -= 1
        if lent.leaves and not lent.readers:
            lender.drop(key)

    def drop(self, key: Key) -> None:
        with self._lock:
            for lender in self._lenders:
                if key in lender.pieces and not lender.pieces[key].readers:
                    lender.drop(key)

    def answer(self, elsewhere: Elsewhere) -> int:
        """Between two steps: give back what lenders want, the pieces used least recently first, to another lender that
        has room, else elsewhere. Returns the bytes."""

        def move(key: Key, memory: Packed) -> None:
            if not self._relend(key, memory):
                elsewhere(key, memory)

        return sum(self._answer(lender, move, lender.owner.pressure()) for lender in self._lenders)

    def _relend(self, key: Key, memory: Packed) -> bool:
        """Another lender has room for the piece, and has it now."""
        with self._lock:
            for lender in self._lenders:
                if key in lender.pieces or lender.owner.pressure() > 0:
                    continue
                if (place := lender.take(key, len(memory))) is not None:
                    break
            else:
                return False
            there = lender.pieces[key]
            there.readers, there.arrives = 1, True
        began_s = lender.pace.begin()
        place.write(memory, 0)
        lender.pace.copied(len(memory), began_s)
        with self._lock:
            there.arrives = False
            self._close(lender, key)
        return True

    def _answer(self, lender: Lender, elsewhere: Elsewhere, wanted: int) -> int:
        before = lender.lent_bytes
        while wanted > 0 and before - lender.lent_bytes < wanted:
            with self._lock:
                key = next((k for k, lent in lender.pieces.items() if not lent.readers), None)
                if key is None:
                    break
                lender.pieces[key].readers += 1  # nobody else drops it meanwhile
                place = lender.place(key)
            elsewhere(key, place.memory)
            with self._lock:
                lender.pieces[key].leaves = True
                self._close(lender, key)  # who has begun to read it meanwhile goes on
        return before - lender.lent_bytes

    def empty(self, elsewhere: Elsewhere) -> None:
        """The engine's model leaves: everything goes elsewhere, and nothing is lent any more."""
        for lender in self._lenders:
            self._answer(lender, elsewhere, lender.lent_bytes)
            try:
                lender.close()
            except DeviceMemoryError:  # a device that is gone; its account reaps this process
                continue
        self._lenders.clear()
