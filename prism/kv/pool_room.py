"""Room in a machine's pool: who gets it, what is dropped for it, and in whose memory the next piece is written.

A full pool writes a piece where one that it drops lies, of the same size: to make a page of shared memory takes the
kernel four times as long as to write it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prism.kv.drop_order import DropOrder
from prism.kv.machine_memory import SpareMemory
from prism.kv.pool_directory import note_of, open_index
from prism.policy.moving import StoredPiece

Extent = tuple[int, int, int]
"""A slot of the index, and where in the pool's memory how many bytes are its."""
_NEAR: Final = 8
"""A piece of the same size is dropped in place of others if it is in the first such part of the pool to go."""
_TRIES: Final = 4
"""So often somebody else may take the room that was made."""
_SPARSE: Final = 4
"""Addresses of the pool's memory are at least so many times its bound, so that there is always a gap."""


class PoolRoom:
    """Of the pool at ``directory``. Safe in several threads."""

    def __init__(self, directory: Path, bound_bytes: int, spare: SpareMemory | None) -> None:
        """Raises ``OSError`` where there is not even memory for the books."""
        self._directory, self._spare = directory, spare
        self.index = open_index(directory, bound_bytes)
        self.bound_bytes = min(bound_bytes, self.index.virtual_bytes // _SPARSE)
        self._guard, self._order = threading.Lock(), DropOrder()
        _rooms.add(self)

    def place(self, name: str, nbytes: int) -> Extent | None:
        """Where this piece is to be written, in memory that is there; it is booked. None: there is no room. Raises
        ``OSError`` where the machine has no memory."""
        with self._guard:
            taken = self._taken_over(name, nbytes)
        if taken is not None:
            return taken
        return self._made(nbytes, lambda bound_bytes: self.index.begin(name, nbytes, bound_bytes))

    def claim(self, label: str, nbytes: int) -> Extent | None:
        """The same for memory that is no piece's, of which there is none yet."""
        return self._made(nbytes, lambda bound_bytes: self.index.claim(label, nbytes, bound_bytes))

    def commit(self, slot: int, nbytes: int) -> bool:
        """The piece is written. False: it is not needed, and gone."""
        stored = self.index.commit(slot, time.time())
        if not stored:
            self._changed(nbytes)
        return stored

    def abandon(self, slot: int, nbytes: int) -> None:
        """What was placed or claimed is given back."""
        self.index.abandon(slot)
        self._changed(nbytes)

    def drop(self, name: str) -> None:
        """Remove a piece."""
        self._changed(self.index.drop(name))

    def give_way(self) -> None:
        """Pieces whose memory the machine needs are dropped."""
        with self._guard:
            self._make(0)

    def pieces(self) -> list[StoredPiece]:
        """All complete ones, by names as ``SPACE/PIECE``."""
        costs: dict[str, float] = {}
        found = []
        for name, nbytes, used_s, position in self.index.pieces():
            space = name.partition("/")[0]
            if (cost := costs.get(space)) is None:
                cost = costs[space] = note_of(self._directory, space).recompute_s_per_byte
            found.append(StoredPiece(name, nbytes, used_s, nbytes * cost, position))
        return found

    def _taken_over(self, name: str, nbytes: int) -> Extent | None:
        """None: there is room, or no piece of this size is about to go, or memory is short."""
        if self._missing_bytes(nbytes) <= 0 or self._missing_bytes(0) > 0:
            return None
        self._rank_anew()
        while self._missing_bytes(nbytes) > 0:
            piece = self._order.take(nbytes, self.bound_bytes // _NEAR)
            if piece is None:
                return None
            # Else it was used meanwhile, or is gone, or somebody reads it, and it is dropped.
            if (taken := self.index.take_over(piece.name, piece.used_s, name, nbytes)) is not None:
                return taken
        return None

    def _made(self, nbytes: int, take: Callable[[int], Extent | None]) -> Extent | None:
        """``take`` is given what may be booked."""
        for _ in range(_TRIES):
            with self._guard:
                if nbytes > self.bound_bytes or not self._make(nbytes):
                    return None
                bound_bytes = self._bound_now()
            if (found := take(bound_bytes)) is not None:
                self._changed(-nbytes)
                return found
            with self._guard:  # somebody was quicker, or there is no slot: one more goes
                self._rank_anew()
                self._drop_first()
        return None

    def _bound_now(self) -> int:
        booked = self.index.books()[0]
        return self.bound_bytes if self._spare is None else min(self.bound_bytes, booked + self._spare())

    def _missing_bytes(self, nbytes: int) -> int:
        """What is to go before so much more fits; 0 or less: it does."""
        booked = self.index.books()[0]
        bound = self.bound_bytes if self._spare is None else min(self.bound_bytes, booked + self._spare())
        return int(booked + nbytes - bound)

    def _make(self, nbytes: int) -> bool:
        """What saves least is dropped until ``nbytes`` fit; if the last order does not do, by a new one. False: they
        do not fit."""
        for again in (False, True):
            missing = self._missing_bytes(nbytes)
            if missing > 0:
                self._rank_anew(again)
            while missing > 0 and (gone := self._drop_first()) is not None:
                missing -= gone
            if missing <= 0:
                break
        return self._missing_bytes(nbytes) <= 0

    def _drop_first(self) -> int | None:
        """The bytes that are gone; None: there are no more pieces in the order."""
        piece = self._order.first()
        if piece is None:
            return None
        gone = self.index.drop(piece.name, piece.used_s)
        self._changed(gone)
        return gone

    def _rank_anew(self, again: bool = False) -> None:
        if again or self._order.is_worn:
            self.index.reap()
            self._order = DropOrder(self.pieces(), time.time())

    def _changed(self, nbytes: int) -> None:
        """So much more (or, below 0, less) is free."""
        if self._spare is not None:
            self._spare.changed(nbytes)

    def _forked(self) -> None:
        """In a child: nobody would see that its parent died."""
        self._guard = threading.Lock()
        self.index.renew()


_rooms: weakref.WeakSet[PoolRoom] = weakref.WeakSet()


def _forked() -> None:
    for room in list(_rooms):
        room._forked()


os.register_at_fork(after_in_child=_forked)
