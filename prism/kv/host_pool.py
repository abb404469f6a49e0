"""The machine's pool of KV in host memory: pieces in shared memory, by space and name, within one bound.

::

    DIRECTORY/index, pieces     what is where, and the pieces themselves (csrc/kvcached/include/kvcached/piece_index.h)
    DIRECTORY/notes/SPACE       whose KV it is and what computing it takes (SpaceNote)

A piece out is one place in memory that is there already, where the pool is full (:mod:`prism.kv.pool_room` says whose),
the copy, and one store by which others find it; a piece in is one look, the copy, and the end of it. Where the machine
runs short of memory the pool is smaller than its bound: pieces go, until others have enough.

Any process may be killed at any time. A piece is found whole or not at all, and never changes while it is found or
somebody reads it. What dead ones were writing, had claimed or were reading is given back by who finds the pool full, or
counts. Readers that have a dropped piece open keep its memory while they read, which the books do not count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prism.kv.claims import ClaimedBytes
from prism.kv.machine_memory import SpareMemory
from prism.kv.naming import PieceName
from prism.kv.piece_file import MemoryBytes, PieceBytes
from prism.kv.pool_directory import FULL, SpaceNote, note_of, noted_spaces, write_note
from prism.kv.pool_room import PoolRoom
from prism.memory.rows import Packed
from prism.policy.moving import StoredPiece

_MOST_OWNER_BYTES = 127


@dataclass(frozen=True, slots=True)
class HostPoolUse:
    """What the pool holds."""

    bound_bytes: int
    booked_bytes: int
    """Of pieces, those being written, and claims."""
    file_bytes: int
    """In complete pieces."""
    pieces: int


class HostPool:
    """The pool at ``directory`` within ``bound_bytes``. Safe in any number of processes and threads."""

    def __init__(self, directory: Path, bound_bytes: int, spare: SpareMemory | None = None) -> None:
        """``spare`` is the memory that the machine has left; None: the bound alone holds. Raises ``OSError`` where
        there is not even memory for the books, or another version of them is in use."""
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._room = PoolRoom(directory, bound_bytes, spare)
        self._index = self._room.index
        self._memory: Packed = np.from_dlpack(self._index.memory())  # type: ignore[assignment]

    def has(self, space: str, piece: PieceName) -> bool:
        return self._index.has(f"{space}/{piece.file}")

    def put(self, space: str, piece: PieceName, nbytes: int, write: Callable[[PieceBytes], None]) -> bool:
        """Store a piece of ``nbytes``, which ``write`` writes to where it lies. False, and nothing is left of it, when
        there is no room. Raises what else goes wrong in ``write``."""
        name = f"{space}/{piece.file}"
        if self._index.has(name):
            return True
        try:
            found = self._room.place(name, nbytes)
            if found is None:
                return False
            slot, offset, _ = found
            try:
                write(MemoryBytes(self._memory[offset : offset + nbytes]))
            except BaseException:
                self._room.abandon(slot, nbytes)
                raise
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        # Where it is not found now another engine was quicker with it, or the pool has ended.
        return self._room.commit(slot, nbytes) or self._index.has(name)

    def opened(self, space: str, piece: PieceName) -> OpenPiece:
        """A context: where the piece lies, None if it is not here (or this process has too many open). Its bytes are
        its own until the end of the context."""
        return OpenPiece(self, f"{space}/{piece.file}")

    def tend(self) -> dict[str, int]:
        """To be called now and then: pieces whose memory the machine needs are dropped. Returns :meth:`claims`."""
        self._room.give_way()
        return self.claims()

    def claim(self, nbytes: int, owner: str = "") -> ClaimedBytes | None:
        """Memory of the pool for this process alone, which no piece makes way for and which makes way for none; pieces
        that are kept here are dropped for it. ``owner``: whose it is, for :meth:`claims`. None: there is not so
        much."""
        label = owner.encode()[:_MOST_OWNER_BYTES].decode(errors="ignore")
        try:
            found = self._room.claim(label, nbytes)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return None
        if found is None:
            return None
        slot, offset, _ = found
        memory = self._memory[offset : offset + nbytes]
        return ClaimedBytes(memory, self._index.pieces_fd, offset, lambda: self._room.abandon(slot, nbytes))

    def claims(self) -> dict[str, int]:
        """Bytes that living processes have claimed, by owner. What dead ones left is given back."""
        self._index.reap()
        found: Counter[str] = Counter()
        for label, nbytes in self._index.claims():
            found[label.decode(errors="ignore")] += nbytes
        return dict(found)

    def claimable_bytes(self) -> int:
        """What :meth:`claim` could give now: all but what is claimed, or being written, already."""
        use = self.use()
        return max(0, use.bound_bytes - (use.booked_bytes - use.file_bytes))

    @property
    def bound_bytes(self) -> int:
        """The most that all processes together store."""
        return self._room.bound_bytes

    def touch(self, space: str, pieces: Iterable[PieceName], at_s: float | None = None) -> None:
        """These pieces of one sequence count as used now (or ``at_s``), all at one time, so that its end is dropped
        first."""
        used_s = time.time() if at_s is None else at_s
        for piece in pieces:
            self._index.touch(f"{space}/{piece.file}", used_s)

    def drop(self, space: str, piece: PieceName) -> None:
        """Remove a piece, one that was found corrupt for instance."""
        self._room.drop(f"{space}/{piece.file}")

    def note_space(self, space: str, note: SpaceNote) -> None:
        """Write down whose KV the pieces of ``space``, of which there are some, are; not where there is no memory."""
        write_note(self.directory, space, note)

    def spaces(self, fingerprint: str) -> list[str]:
        """The spaces of KV of the weights with this fingerprint."""
        noted = noted_spaces(self.directory)
        return sorted(space for space in noted if self.note(space).weights.split(" ")[0] == fingerprint)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of complete pieces, by fingerprint of their weights."""
        by_space: Counter[str] = Counter()
        for piece in self.pieces():
            by_space[piece.name.partition("/")[0]] += piece.nbytes
        found: Counter[str] = Counter()
        for space, nbytes in by_space.items():
            if fingerprint := self.note(space).weights.split(" ")[0]:
                found[fingerprint] += nbytes
        return dict(found)

    def note(self, space: str) -> SpaceNote:
        return note_of(self.directory, space)

    def pieces(self, space: str = "") -> list[StoredPiece]:
        """Those of a space (or all) that are complete, the one used last first; names as ``SPACE/PIECE``."""
        self._index.reap()
        found = [piece for piece in self._room.pieces() if piece.name.startswith(space)]
        return sorted(found, key=lambda piece: (-piece.used_s, piece.position))

    def use(self) -> HostPoolUse:
        """What is there; what dead writers left is given back."""
        self._index.reap()
        booked_bytes, piece_bytes, pieces, _ = self._index.books()
        return HostPoolUse(self.bound_bytes, booked_bytes, piece_bytes, pieces)


class OpenPiece:
    """See :meth:`HostPool.opened`."""

    __slots__ = ("_name", "_pool", "_slot")

    def __init__(self, pool: HostPool, name: str) -> None:
        self._pool, self._name = pool, name
        self._slot = -1

    def __enter__(self) -> MemoryBytes | None:
        found = self._pool._index.pin(self._name)
        if found is None:
            return None
        self._slot, offset, nbytes = found
        return MemoryBytes(self._pool._memory[offset : offset + nbytes])

    def __exit__(self, *_: object) -> None:
        if self._slot >= 0:
            self._pool._index.unpin(self._slot)
