"""The machine's pool of KV in host memory: pieces as files in shared memory, by space and name, within one bound.

::

    DIRECTORY/lock              held for changes (prism.kv.pool_lock)
    DIRECTORY/books             | bytes in files | (prism.kv.pool_books)
    DIRECTORY/SPACE/about       whose KV it is and what computing it takes (SpaceNote)
    DIRECTORY/SPACE/PIECE       complete pieces (prism.kv.piece_file); their times say when they were last used
    DIRECTORY/SPACE/.part-N     being written: its writer holds a lock on it
    DIRECTORY/claims/.part-N    claimed by a process for itself (prism.kv.claims), likewise locked; names its owner

What is dropped for a piece, and where it is written: :mod:`prism.kv.pool_room`. Where the machine runs short of memory
the pool is smaller than its bound: pieces go, until others have enough.

Any process may be killed at any time. A piece is published by its rename, whole or not at all, and never changed while
it has its name or somebody reads it, who holds a shared lock on it; who opened it before its file was taken for another
piece, and locks it afterwards, sees that its name is gone. Who finds the pool full counts the files, and removes what
dead writers left. Readers that hold a dropped piece open keep its memory while they read, which the books do not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from prism.kv.claims import ClaimedBytes
from prism.kv.machine_memory import SpareMemory
from prism.kv.naming import PieceName
from prism.kv.piece_file import FileBytes, MemoryBytes, PieceBytes
from prism.kv.piece_maps import PieceMaps
from prism.kv.pool_directory import FULL, SpaceNote, is_written, note_of, part_name, write_note
from prism.kv.pool_room import PoolRoom
from prism.policy.moving import StoredPiece
from prism.weights.store.locks import try_lock

_CLAIMS: Final = "claims"
_OWNER_LENGTH: Final = 120
"""Of an owner's name in that of a claim's file, quoted."""


@dataclass(frozen=True, slots=True)
class HostPoolUse:
    """What the pool holds."""

    bound_bytes: int
    booked_bytes: int
    """In the books: at least what is there."""
    file_bytes: int
    """In complete pieces."""
    pieces: int


class HostPool:
    """The pool at ``directory`` within ``bound_bytes``. Safe in any number of processes and threads."""

    def __init__(self, directory: Path, bound_bytes: int, spare: SpareMemory | None = None) -> None:
        """``spare`` is the memory that the machine has left; None: the bound alone holds. Raises ``OSError`` where
        there is not even memory for the books."""
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._room, self._maps = PoolRoom(directory, bound_bytes, spare), PieceMaps()
        self._lock = self._room.lock
        self._folders: set[str] = set()
        """Those that this process made or found."""

    def has(self, space: str, piece: PieceName) -> bool:
        return os.path.exists(f"{self.directory}/{space}/{piece.file}")  # noqa: PTH110

    def put(self, space: str, piece: PieceName, nbytes: int, write: Callable[[PieceBytes], None]) -> bool:
        """Store a piece of ``nbytes``, which ``write`` writes to where it lies. False, and nothing is left of it, when
        there is no room. Raises what else goes wrong in ``write``."""
        folder = f"{self.directory}/{space}"
        final, part = f"{folder}/{piece.file}", f"{folder}/{part_name(str(nbytes))}"
        if os.path.exists(final):  # noqa: PTH110
            return True
        try:
            if folder not in self._folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)  # noqa: PTH102
                self._folders.add(folder)
            found = self._room.take_over(nbytes, part)
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) if found is None else found
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno not in FULL:
                raise
            self._folders.discard(folder)
            return False  # the pool was dropped, or the file system takes no more files
        try:  # the file is there and locked before it is booked, so that who counts knows that somebody writes
            if found is None and not (try_lock(fd, exclusive=True) and self._room.book(nbytes, Path(part))):
                Path(part).unlink(missing_ok=True)
                return False
            place = FileBytes(fd) if found is None else self._maps.place(fd)
            if self._write(place, fd, part, final, write):
                return True
            self._remove_part(Path(part), nbytes, fd)
        except BaseException:
            self._remove_part(Path(part), nbytes, fd)
            raise
        finally:
            os.close(fd)
        return self.has(space, piece)

    def _write(self, place: PieceBytes, fd: int, part: str, final: str, write: Callable[[PieceBytes], None]) -> bool:
        try:
            write(place)
            with self._lock():  # who counts, or drops pieces, finds it under one name
                if not os.path.exists(final):  # noqa: PTH110  (else another engine was quicker)
                    os.utime(fd)  # of pages that were there the time is that of the piece before
                    os.rename(part, final)  # noqa: PTH104
                    return True
        except FileNotFoundError:
            return False  # likewise, meanwhile
        except OSError as error:
            if error.errno not in FULL:
                raise
        return False

    def _remove_part(self, part: Path, nbytes: int, fd: int = -1) -> None:
        """``fd``: its own, where others may have it mapped."""
        if fd >= 0:
            os.ftruncate(fd, 0)
        part.unlink(missing_ok=True)
        self._room.unbook(nbytes)

    @contextlib.contextmanager
    def opened(self, space: str, piece: PieceName) -> Iterator[MemoryBytes | None]:
        """Where the piece lies, None if it is not here. Its bytes are its own until the end of the context."""
        path = f"{self.directory}/{space}/{piece.file}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # its writer, or who drops it, has it for a moment only
            place = None
            with contextlib.suppress(OSError):  # its name is gone; or no memory, or no more mappings
                if os.path.samestat(os.stat(path), os.fstat(fd)):  # noqa: PTH116
                    place = self._maps.place(fd)
            yield place
            if os.fstat(fd).st_nlink == 0:  # dropped meanwhile: this mapping would keep its memory
                self._maps.forget(fd)
        finally:
            os.close(fd)

    def tend(self) -> dict[str, int]:
        """To be called now and then: pieces whose memory the machine needs are dropped. Returns :meth:`claims`."""
        self._room.give_way()
        return self.claims()

    def claim(self, nbytes: int, owner: str = "") -> ClaimedBytes | None:
        """Memory of the pool for this process alone, which no piece makes way for and which makes way for none; pieces
        that are kept here are dropped for it. ``owner``: whose it is, for :meth:`claims`. None: there is not so
        much."""
        folder = self.directory / _CLAIMS
        part = folder / part_name(f"{quote(owner, safe='')[:_OWNER_LENGTH]}-{nbytes}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with self._lock():  # who looks for dead owners sees it locked or not at all
                fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                is_mine = try_lock(fd, exclusive=True)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno not in FULL:
                raise
            return None  # as in put
        if not (is_mine and self._room.book(nbytes, part)):
            part.unlink(missing_ok=True)
            os.close(fd)
            return None
        return ClaimedBytes(fd, part, nbytes, self._remove_part)

    def claims(self) -> dict[str, int]:
        """Bytes that living processes have claimed, by owner. What dead ones left is removed."""
        found: Counter[str] = Counter()
        try:
            files = list((self.directory / _CLAIMS).iterdir())
        except FileNotFoundError:
            return {}
        with self._lock():
            living = [file for file in files if is_written(file)]
        if len(living) < len(files):
            self._room.count()
        for file in living:
            owner, nbytes = file.name.split("-", 4)[-1].rsplit("-", 1)
            found[unquote(owner)] += int(nbytes)
        return dict(found)

    def claimable_bytes(self) -> int:
        """What :meth:`claim` could give now: all but what is claimed, or being written, already."""
        use = self.use()
        return max(0, use.bound_bytes - (use.booked_bytes - use.file_bytes))

    @property
    def bound_bytes(self) -> int:
        """The most that all processes together store."""
        return self._room.bound_bytes

    def touch(self, space: str, pieces: Iterable[PieceName]) -> None:
        """These pieces of one sequence count as used now, all at one time, so that its end is dropped first."""
        now_s = time.time()
        for piece in pieces:
            with contextlib.suppress(FileNotFoundError):
                os.utime(f"{self.directory}/{space}/{piece.file}", (now_s, now_s))

    def drop(self, space: str, piece: PieceName) -> None:
        """Remove a piece, one that was found corrupt for instance."""
        self._room.drop(self.directory / space / piece.file)

    def note_space(self, space: str, note: SpaceNote) -> None:
        """Write down whose KV the pieces of ``space``, of which there are some, are; not where there is no memory."""
        write_note(self.directory / space, note)

    def spaces(self, fingerprint: str) -> list[str]:
        """The spaces of KV of the weights with this fingerprint."""
        found = [f for f in self.directory.iterdir() if f.is_dir() and note_of(f).weights.split(" ")[0] == fingerprint]
        return sorted(f.name for f in found)

    def note(self, space: str) -> SpaceNote:
        return note_of(self.directory / space)

    def pieces(self, space: str) -> list[StoredPiece]:
        """Those of a space that are complete, the one used last first; names as ``SPACE/PIECE``."""
        found = [piece for piece in self._room.count()[0] if piece.name.startswith(f"{space}/")]
        return sorted(found, key=lambda piece: (-piece.used_s, piece.position))

    def use(self) -> HostPoolUse:
        """What is there; the files of dead writers are removed."""
        pieces, booked_bytes = self._room.count()
        return HostPoolUse(self.bound_bytes, booked_bytes, sum(p.nbytes for p in pieces), len(pieces))
