"""The machine's pool of KV in host memory: pieces as files in shared memory, by space and name, within one bound.

::

    DIRECTORY/lock              held for changes of the books
    DIRECTORY/books             | bytes in files | of these in free ones |
    DIRECTORY/SPACE/about       whose KV it is and what computing it takes (SpaceNote)
    DIRECTORY/SPACE/PIECE       complete pieces (prism.kv.piece_file); their times say when they were last used
    DIRECTORY/SPACE/.part-N     being written: its writer holds a lock on it
    DIRECTORY/free/NBYTES/N     pages of dropped pieces, for the next ones (prism.kv.free_files)
    DIRECTORY/claims/.part-N    claimed by a process for itself (prism.kv.claims), likewise locked; names its owner

Where the machine runs short of memory the pool is smaller than its bound: free pages go, and pieces, until others have
enough. A full pool drops a part of itself at a time, whose pages the next pieces take; what is not taken for a while is
given back.

Any process may be killed at any time. Room is booked before bytes are written and given back after they are gone, so
that the books only ever count too much; who finds the pool full counts the files, and removes what dead writers left.
A piece is published by its rename, whole or not at all, and never changed while it has its name or somebody reads it,
who holds a shared lock on it. Readers that hold a dropped piece open keep its memory while they read, which the books
do not count.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from prism.kv.claims import ClaimedBytes
from prism.kv.free_files import FREE, FreeFiles, give_back, give_back_tree
from prism.kv.machine_memory import SpareMemory
from prism.kv.naming import PieceName
from prism.kv.piece_file import FileBytes, MemoryBytes, PieceBytes
from prism.kv.piece_maps import PieceMaps
from prism.policy.moving import StoredPiece, choose_dropped
from prism.weights.store.locks import locked, still_named, try_lock

SHARED_MEMORY: Final = Path("/dev/shm")
_WORD: Final = struct.Struct("<q")
_BOOKED, _FREE_BYTES = 0, _WORD.size
"""Where in the books."""
_PART: Final = ".part-"
_CLAIMS: Final = "claims"
_OWNER: Final = ".accounts"
_ABOUT: Final = "about"
_FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
_OWNER_LENGTH: Final = 120
"""Of an owner's name in that of a claim's file, quoted."""
_SWEEP: Final = 8
"""Who makes room frees at least this part of the bound, so that looking at all files is seldom."""
_FREE_SHARE: Final = 4
"""Free pages are at most this part of the bound."""
_IDLE_S: Final = 30.0
"""Pages that nobody has taken for so long are given back."""


class SpaceNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a space beside its name."""

    weights: str = ""
    """Whose KV: the weights' fingerprint, a space, and how they are split and typed."""
    recompute_s_per_byte: float = 1e-9
    """What computing its KV takes, for the order in which pieces are dropped."""


_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class HostPoolUse:
    """What the pool holds."""

    bound_bytes: int
    booked_bytes: int
    """In the books: at least what is there."""
    file_bytes: int
    """In complete pieces."""
    pieces: int
    free_bytes: int = 0
    """Kept for the next pieces, booked, too."""


def host_pool_directory(account_dir: Path, root: Path = SHARED_MEMORY) -> Path:
    """The pool of the machine whose devices have their accounts in ``account_dir``."""
    tag = hashlib.sha256(str(account_dir.resolve()).encode()).hexdigest()[:12]
    return root / f"prism-kv-{os.getuid()}-{tag}"


def drop_host_pool(account_dir: Path, root: Path = SHARED_MEMORY) -> None:
    """Gives all memory of the pool back. Readers that have pieces open keep those."""
    give_back_tree(host_pool_directory(account_dir, root))


def claim_host_pool(account_dir: Path, root: Path = SHARED_MEMORY) -> Path:
    """The pool's directory, with whose it is written down; pools whose accounts are gone from the disk are removed."""
    mine = host_pool_directory(account_dir, root)
    mine.mkdir(mode=0o700, exist_ok=True)
    (mine / _OWNER).write_text(str(account_dir.resolve()))
    for other in root.glob(f"prism-kv-{os.getuid()}-*"):
        with contextlib.suppress(FileNotFoundError):
            if not Path((other / _OWNER).read_text()).is_dir():
                give_back_tree(other)
    return mine


class HostPool:
    """The pool at ``directory`` within ``bound_bytes``. Safe in any number of processes and threads."""

    def __init__(self, directory: Path, bound_bytes: int, spare: SpareMemory | None = None) -> None:
        """``spare`` is the memory that the machine has left; None: the bound alone holds. Raises ``OSError`` where
        there is not even memory for the books."""
        self.directory, self._bound_bytes, self._spare = directory, bound_bytes, spare
        self._lock_file = f"{directory}/lock"
        self._free, self._maps = FreeFiles(directory, bound_bytes // _FREE_SHARE), PieceMaps()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock():
            fd = os.open(directory / "books", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, 2 * _WORD.size)  # or a write to the mapping could be a signal
                self._books = mmap.mmap(fd, 2 * _WORD.size)
            finally:
                os.close(fd)

    def has(self, space: str, piece: PieceName) -> bool:
        return os.path.exists(f"{self.directory}/{space}/{piece.file}")  # noqa: PTH110

    def put(self, space: str, piece: PieceName, nbytes: int, write: Callable[[PieceBytes], None]) -> bool:
        """Store a piece of ``nbytes``, which ``write`` writes to where it lies. False, and nothing is left of it, when
        there is no room. Raises what else goes wrong in ``write``."""
        if self.has(space, piece):
            return True
        folder = f"{self.directory}/{space}"
        part = f"{folder}/{_PART}{os.getpid()}-{next(_numbers)}-{time.time_ns()}-{nbytes}"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)  # noqa: PTH102
            found = self._take_free(nbytes, part)
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600) if found is None else found
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno not in _FULL:
                raise
            return False  # the pool was dropped, or the file system takes no more files
        try:  # the file is there and locked before it is booked, so that who counts knows that somebody writes
            if found is None and not (try_lock(fd, exclusive=True) and self._book(nbytes, Path(part))):
                Path(part).unlink(missing_ok=True)
                return False
            place = FileBytes(fd) if found is None else self._maps.place(fd)
            if self._write(place, part, f"{folder}/{piece.file}", write):
                return True
            self._remove_part(Path(part), nbytes, fd)
        except BaseException:
            self._remove_part(Path(part), nbytes, fd)
            raise
        finally:
            os.close(fd)
        return self.has(space, piece)

    def _take_free(self, nbytes: int, part: str) -> int | None:
        """The file of a dropped piece as ``part``, locked and booked. A pool that is full drops pieces for it."""
        with self._lock():
            if self._booked() > self._bound_now():
                return None  # memory is short
            fd = self._free.take(nbytes, part)
            if fd is None and self._booked() + nbytes > self._bound_now():
                self._retire(nbytes)
                fd = self._free.take(nbytes, part)
            if fd is not None:
                self._set(_FREE_BYTES, max(0, self._get(_FREE_BYTES) - nbytes))
            return fd

    def _retire(self, nbytes: int) -> None:
        """Count what is there; what saves least is dropped until ``nbytes`` fit, and its pages are free."""
        pieces = self._count()
        missing = self._booked() + nbytes - self._bound_now()
        if missing <= 0 or nbytes > self._bound_bytes:
            return
        for name in choose_dropped(pieces, max(missing, self._bound_bytes // _SWEEP), time.time()):
            path = f"{self.directory}/{name}"
            kept_bytes = self._free.keep(path, self._get(_FREE_BYTES))
            if kept_bytes is None:
                self._remove(Path(path))
            else:
                self._set(_FREE_BYTES, self._get(_FREE_BYTES) + kept_bytes)

    def _write(self, place: PieceBytes, part: str, final: str, write: Callable[[PieceBytes], None]) -> bool:
        try:
            write(place)
            with self._lock():  # who counts, or drops pieces, finds it under one name
                if not os.path.exists(final):  # noqa: PTH110  (else another engine was quicker)
                    os.utime(part)  # of pages that were there the time is that of the piece before
                    os.rename(part, final)  # noqa: PTH104
                    return True
        except FileNotFoundError:
            return False  # likewise, meanwhile
        except OSError as error:
            if error.errno not in _FULL:
                raise
        return False

    def _remove_part(self, part: Path, nbytes: int, fd: int = -1) -> None:
        """``fd``: its own, where others may have it mapped."""
        if fd >= 0:
            os.ftruncate(fd, 0)
        part.unlink(missing_ok=True)
        self._unbook(nbytes)

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
            if still_named(fd, Path(path)):
                with contextlib.suppress(OSError):  # no memory, or no more mappings
                    place = self._maps.place(fd)
            yield place
            if os.fstat(fd).st_nlink == 0:  # dropped meanwhile: this mapping would keep its memory
                self._maps.forget(fd)
        finally:
            os.close(fd)

    def tend(self) -> dict[str, int]:
        """To be called now and then: free pages that nobody takes, or that the machine needs, are given back. Returns
        :meth:`claims`."""
        with self._lock():
            self._given_back(self._free.give_back_older(time.time() - _IDLE_S))
            missing = self._booked() - self._bound_now()
            if missing > 0:
                self._given_back(self._free.give_back(missing))
        return self.claims()

    def claim(self, nbytes: int, owner: str = "") -> ClaimedBytes | None:
        """Memory of the pool for this process alone, which no piece makes way for and which makes way for none; pieces
        that are kept here are dropped for it. ``owner``: whose it is, for :meth:`claims`. None: there is not so
        much."""
        folder = self.directory / _CLAIMS
        name = quote(owner, safe="")[:_OWNER_LENGTH]
        part = folder / f"{_PART}{os.getpid()}-{next(_numbers)}-{time.time_ns()}-{name}-{nbytes}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with self._lock():  # who looks for dead owners sees it locked or not at all
                fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                is_mine = try_lock(fd, exclusive=True)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno not in _FULL:
                raise
            return None  # as in put
        if not (is_mine and self._book(nbytes, part)):
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
            living = [file for file in files if _is_written(file)]
            if len(living) < len(files):
                self._count()
        for file in living:
            owner, nbytes = file.name.split("-", 4)[-1].rsplit("-", 1)
            found[unquote(owner)] += int(nbytes)
        return dict(found)

    def claimable_bytes(self) -> int:
        """What :meth:`claim` could give now: all but what is claimed, or being written, already."""
        use = self.use()
        return max(0, use.bound_bytes - (use.booked_bytes - use.file_bytes - use.free_bytes))

    @property
    def bound_bytes(self) -> int:
        """The most that all processes together store."""
        return self._bound_bytes

    def touch(self, space: str, pieces: Iterable[PieceName]) -> None:
        """These pieces of one sequence count as used now, all at one time, so that its end is dropped first."""
        now_s = time.time()
        for piece in pieces:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.directory / space / piece.file, (now_s, now_s))

    def drop(self, space: str, piece: PieceName) -> None:
        """Remove a piece, one that was found corrupt for instance."""
        with self._lock():
            self._remove(self.directory / space / piece.file)

    def note_space(self, space: str, note: SpaceNote) -> None:
        """Write down whose KV the pieces of ``space``, of which there are some, are; not where there is no memory."""
        file = self.directory / space / _ABOUT
        partial = file.with_name(f"{_PART}{os.getpid()}-{next(_numbers)}-{time.time_ns()}-0")
        try:
            partial.write_bytes(msgspec.json.encode(note))
            partial.rename(file)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if not isinstance(error, FileNotFoundError) and error.errno not in _FULL:
                raise

    def spaces(self, fingerprint: str) -> list[str]:
        """The spaces of KV of the weights with this fingerprint."""
        found = [f for f in self.directory.iterdir() if f.is_dir() and _note_of(f).weights.split(" ")[0] == fingerprint]
        return sorted(f.name for f in found)

    def note(self, space: str) -> SpaceNote:
        return _note_of(self.directory / space)

    def use(self) -> HostPoolUse:
        """What is there; the files of dead writers are removed."""
        with self._lock():
            pieces = self._count()
            file_bytes, free_bytes = sum(p.nbytes for p in pieces), self._get(_FREE_BYTES)
            return HostPoolUse(self._bound_bytes, self._booked(), file_bytes, len(pieces), free_bytes)

    def _book(self, nbytes: int, part: Path) -> bool:
        """Book what is to be written to ``part``."""
        with self._lock():
            if self._booked() + nbytes > self._bound_now():
                if nbytes > self._bound_bytes:
                    return False
                self._make_room(nbytes, part)
            if self._booked() + nbytes > self._bound_now():
                return False
            self._set_booked(self._booked() + nbytes)
            if self._spare is not None:
                self._spare.changed(-nbytes)
            return True

    def _bound_now(self) -> int:
        """What may be in the books as long as the machine has the memory that it has."""
        return self._bound_bytes if self._spare is None else min(self._bound_bytes, self._booked() + self._spare())

    def _unbook(self, nbytes: int) -> None:
        with self._lock():
            self._set_booked(max(0, self._booked() - nbytes))

    def _make_room(self, nbytes: int, part: Path) -> None:
        """Count what is there; free pages go, and then what saves least, until ``nbytes`` fit."""
        pieces = self._count(part)
        missing = self._booked() + nbytes - self._bound_now()
        if missing > 0:
            self._given_back(self._free.give_back(missing))
            missing = self._booked() + nbytes - self._bound_now()
        if missing <= 0:
            return
        for name in choose_dropped(pieces, max(missing, self._bound_bytes // _SWEEP), time.time()):
            self._remove(self.directory / name)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            nbytes = path.stat().st_size
            give_back(path)
            self._gone(nbytes)

    def _given_back(self, nbytes: int) -> None:
        """So many free bytes are no more."""
        self._set(_FREE_BYTES, max(0, self._get(_FREE_BYTES) - nbytes))
        self._gone(nbytes)

    def _gone(self, nbytes: int) -> None:
        self._set_booked(max(0, self._booked() - nbytes))
        if self._spare is not None:
            self._spare.changed(nbytes)

    def _count(self, unbooked: Path | None = None) -> list[StoredPiece]:
        """All complete pieces. The books then say what they and living writers hold, but for that of ``unbooked``."""
        pieces: list[StoredPiece] = []
        writing_bytes = 0
        for folder in self.directory.iterdir():
            if not folder.is_dir() or folder.name == FREE:
                continue
            space, cost = folder.name, _note_of(folder).recompute_s_per_byte
            for entry in os.scandir(folder):
                if entry.name.startswith(_PART):
                    path = Path(entry.path)
                    if path != unbooked and _is_written(path):
                        writing_bytes += int(entry.name.rpartition("-")[2])
                elif entry.name != _ABOUT:
                    info, name = entry.stat(), f"{space}/{entry.name}"
                    position = int(entry.name[:6], 16)
                    pieces.append(StoredPiece(name, info.st_size, info.st_mtime, info.st_size * cost, position))
        self._set(_FREE_BYTES, self._free.total_bytes())
        self._set_booked(sum(p.nbytes for p in pieces) + writing_bytes + self._get(_FREE_BYTES))
        return pieces

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            fd = os.open(self._lock_file, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            with locked(Path(self._lock_file)):
                yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def pieces(self, space: str) -> list[StoredPiece]:
        """Those of a space that are complete, the one used last first; names as ``SPACE/PIECE``."""
        with self._lock():
            found = [piece for piece in self._count() if piece.name.startswith(f"{space}/")]
        return sorted(found, key=lambda piece: (-piece.used_s, piece.position))

    def _booked(self) -> int:
        return self._get(_BOOKED)

    def _set_booked(self, nbytes: int) -> None:
        self._set(_BOOKED, nbytes)

    def _get(self, word: int) -> int:
        return int(_WORD.unpack_from(self._books, word)[0])

    def _set(self, word: int, nbytes: int) -> None:
        _WORD.pack_into(self._books, word, nbytes)


def _note_of(folder: Path) -> SpaceNote:
    try:
        return msgspec.json.decode((folder / _ABOUT).read_bytes(), type=SpaceNote)
    except (FileNotFoundError, msgspec.MsgspecError):
        return SpaceNote()


def _is_written(part: Path) -> bool:
    """Whether a living process writes it; the file of a dead one is removed."""
    try:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        alive = not try_lock(fd, exclusive=True)
        if not alive:
            os.ftruncate(fd, 0)  # whoever has it mapped from the piece before
            part.unlink(missing_ok=True)
        return alive
    finally:
        os.close(fd)
