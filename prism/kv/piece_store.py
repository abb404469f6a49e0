"""Where one engine's pieces are: copies on their way out, memory that devices lend, the machine's pool. What a piece is
of (tokens of a sequence, a window before one point of it) is its caller's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from prism.kv.host_pool import HostPool
from prism.kv.lent_shelf import Key, LentShelf
from prism.kv.naming import PieceName
from prism.kv.pacing import LinkPace
from prism.kv.piece_file import (
    BadPiece,
    MemoryBytes,
    PieceBytes,
    PieceStaging,
    piece_bytes,
    read_piece,
    write_piece,
)
from prism.memory.rows import CopiedRows, Packed, PoolRows, RowNumbers

log = logging.getLogger(__name__)

_MOST_SOON_BYTES: Final = 256 << 20
"""Of copies that wait to be stored; what is beyond is lost."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``rows`` of some pool under a name of a space."""

    space: str
    name: PieceName
    rows: RowNumbers

    @property
    def key(self) -> Key:
        return self.space, self.name.file


class PieceStore:
    """Not for several threads at once, but that :meth:`bring` may run in one of its own while others are called."""

    def __init__(self, pool: HostPool, lent: LentShelf | None, link_bytes_per_s: float) -> None:
        self.pool, self._lent = pool, lent
        self._pace = LinkPace(link_bytes_per_s)
        self._staging = PieceStaging(), PieceStaging()
        self._thread: ThreadPoolExecutor | None = None
        self._soon: dict[Key, threading.Event] = {}
        """Pieces whose copies the thread has not stored yet, with what it sets then."""
        self._soon_bytes = 0
        self._guard = threading.Lock()
        """Of the line above."""
        self.corrupt_pieces = 0

    def has(self, space: str, name: PieceName) -> bool:
        key = space, name.file
        return key in self._soon or (self._lent is not None and self._lent.has(key)) or self.pool.has(space, name)

    def put(self, piece: Piece, source: PoolRows) -> bool:
        """Store it; it is there when this returns. False: there is no room."""
        return self._put(piece, source, self._staging[0])

    def put_soon(self, pieces: Sequence[Piece], source: PoolRows, done: Callable[[int], None]) -> float:
        """The same for rows that are about to be given up: they are copied now, and a thread sums and stores the copy
        and says ``done`` with how many there was room for. The pieces count as stored at once. Returns how long the
        copy took, s; 0.0: too much is on its way already, and they are lost."""
        width = sum(column.width for column in source.columns)
        rows = np.unique(np.concatenate([piece.rows for piece in pieces]))
        nbytes = len(rows) * width
        if self._soon_bytes + nbytes > _MOST_SOON_BYTES:
            return 0.0
        start_s = time.perf_counter()
        copied = CopiedRows(source, rows)
        took_s = time.perf_counter() - start_s
        with self._guard:
            self._soon_bytes += nbytes
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-out")
        stored = threading.Event()
        self._soon.update({piece.key: stored for piece in pieces})  # before the thread may take them out again
        self._thread.submit(self._put_copy, pieces, copied, nbytes, stored, done)
        return took_s

    def _put_copy(
        self,
        pieces: Sequence[Piece],
        copied: CopiedRows,
        nbytes: int,
        stored: threading.Event,
        done: Callable[[int], None],
    ) -> None:
        kept = 0
        try:
            for piece in pieces:
                kept += self._put(piece, copied, self._staging[1])
        finally:
            with self._guard:
                self._soon_bytes -= nbytes
            done(kept)
            for piece in pieces:
                self._soon.pop(piece.key, None)
            stored.set()

    def _put(self, piece: Piece, source: PoolRows, staging: PieceStaging) -> bool:
        where = np.ascontiguousarray(piece.rows)
        nbytes = piece_bytes([column.width for column in source.columns], len(where))

        def write(place: PieceBytes) -> None:
            write_piece(place, source, where, staging, self._pace)

        def write_lent(place: MemoryBytes, pace: LinkPace) -> None:
            write_piece(place, source, where, staging, pace)

        try:
            if self._lent is not None and self._lent.put(piece.key, nbytes, write_lent):
                return True
            return self.pool.put(piece.space, piece.name, nbytes, write)
        except (BadPiece, OSError) as error:
            log.warning("KV is not kept: %s", error)
            return False

    def bring(self, piece: Piece, target: PoolRows, skip: int = 0) -> bool:
        """Write its rows from the ``skip``-th on to ``piece.rows`` of ``target``. False: it is gone, or was corrupt and
        is gone now; some rows may have been written then."""
        if (soon := self._soon.get(piece.key)) is not None:
            soon.wait()
        where = np.ascontiguousarray(piece.rows)
        if self._lent is not None:
            with self._lent.opened(piece.key) as lent:
                if lent is not None and self._read(*lent, target, where, skip):
                    return True
            self._lent.drop(piece.key)
        with self.pool.opened(piece.space, piece.name) as place:
            if place is None:
                return False
            come = self._read(place, self._pace, target, where, skip)
        if not come:
            self.pool.drop(piece.space, piece.name)
        return come

    def _read(self, place: PieceBytes, pace: LinkPace, target: PoolRows, where: RowNumbers, skip: int) -> bool:
        try:
            read_piece(place, target, where, skip, pace)
        except OSError as error:
            log.warning("KV is computed again: %s", error)
            return False
        except BadPiece as error:
            log.warning("KV is computed again: %s", error)
            self.corrupt_pieces += 1
            return False
        return True

    def answer(self) -> None:
        """Between two steps of the engine: what lenders want back goes to host memory."""
        if self._lent is not None:
            self._lent.answer(self._to_pool)

    def close(self, limit_s: float) -> None:
        """The model leaves; what others lent goes to host memory, as far as ``limit_s`` allows."""
        end_s = time.perf_counter() + limit_s
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._lent is not None:
            self._lent.empty(lambda key, data: self._to_pool(key, data) if time.perf_counter() < end_s else None)

    def _to_pool(self, key: Key, memory: Packed) -> None:
        space, file = key
        piece = PieceName.of_file(int(file[:6], 16), file[7:])

        def write(place: PieceBytes) -> None:
            began_s = self._pace.begin()
            place.write(memory, 0)
            self._pace.copied(len(memory), began_s)

        try:
            self.pool.put(space, piece, len(memory), write)
        except OSError as error:
            log.warning("KV that was lent is not kept: %s", error)
