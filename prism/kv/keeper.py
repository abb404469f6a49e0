"""One engine's keeper of KV outside its arena: stores pieces of its sequences, finds them again, brings them back.

What it stores goes to host memory (:mod:`prism.kv.host_pool`), where every engine of the machine that runs the same
weights in the same way finds it by the tokens. Moving and computing again are compared by estimated time each time
(:func:`prism.policy.moving.choose_way`), with rates measured here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prism.kv.host_pool import HostPool, SpaceNote
from prism.kv.lent_shelf import Key, LentShelf
from prism.kv.naming import PIECE_TOKENS, PieceChain, PieceName, as_tokens, space_of
from prism.kv.pacing import LinkPace
from prism.kv.piece_file import (
    BadPiece,
    FileBytes,
    MemoryBytes,
    PieceBytes,
    PieceStaging,
    piece_bytes,
    read_piece,
    write_piece,
)
from prism.memory.rows import CopiedRows, Packed, PoolRows, RowNumbers
from prism.policy.moving import Leg, Way, WayChoice, choose_way

log = logging.getLogger(__name__)

_FIRST_GUESS_BYTES_S: Final = 2e9
_PIECE_S: Final = 1e-4
"""What a piece costs whatever its size: a file is opened, summed, renamed."""
_MOST_SOON_BYTES: Final = 256 << 20
"""Of copies that wait to be stored; what is beyond is lost."""
_NEWEST: Final = 0.25
"""Weight of the newest measurement of a rate."""


class RateEstimate:
    """Units per second, as measured last; a guess before."""

    def __init__(self, guess: float) -> None:
        self.per_s = guess
        self._measured = False

    def note(self, amount: float, took_s: float) -> None:
        if took_s <= 0 or amount <= 0:
            return
        now = amount / took_s
        self.per_s = now if not self._measured else (1 - _NEWEST) * self.per_s + _NEWEST * now
        self._measured = True


class KvKeeper:
    """Of one model's activation in one engine process. Not for several threads at once, but that :meth:`fetch` may run
    in one of its own while :meth:`keep` runs in another."""

    def __init__(
        self,
        pool: HostPool,
        weights: str,
        prefill_tokens_per_s: float,
        link_bytes_per_s: float = 0.0,
        lent: LentShelf | None = None,
        leave_s: float = 1.0,
    ) -> None:
        """``weights`` names them and how they are split; ``prefill_tokens_per_s`` is a guess until it is measured;
        ``link_bytes_per_s`` is the declared rate of the link to host memory, 0: none; ``lent`` takes what it can before
        host memory does; ``leave_s`` is the most that storing everything may take when the model leaves."""
        self.leave_s = leave_s
        self._pool, self._weights, self._lent = pool, weights, lent
        self._rows: PoolRows | None = None
        self._widths: tuple[int, ...] = ()
        self._staging = PieceStaging(), PieceStaging()
        self._thread: ThreadPoolExecutor | None = None
        self._soon: dict[Key, Future[None]] = {}
        """Pieces whose copies the thread has not stored yet."""
        self._soon_bytes = 0
        self._guard = threading.Lock()
        """Of the line above."""
        self._pace = LinkPace(link_bytes_per_s)
        guess = (0.0 if lent is None else lent.bytes_per_s) or link_bytes_per_s or _FIRST_GUESS_BYTES_S
        self.out_bytes, self.in_bytes = RateEstimate(guess), RateEstimate(guess)
        self.prefill_tokens = RateEstimate(prefill_tokens_per_s)
        self._spaces: set[str] = set()
        """In which something was stored."""
        self.stored_pieces = self.fetched_tokens = self.corrupt_pieces = 0

    def attach(self, rows: PoolRows) -> None:
        """The rows that are moved from now on."""
        self._rows = rows
        self._widths = tuple(column.width for column in rows.columns)

    @property
    def attached(self) -> bool:
        return self._rows is not None

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """A prefill of so many tokens took so long."""
        self.prefill_tokens.note(tokens, took_s)

    def keep_is_worth(self, tokens: int) -> bool:
        """Whether storing ``tokens`` and bringing them back takes less than computing them again."""
        return self._choose((self._leg(tokens, self.out_bytes), self._leg(tokens, self.in_bytes)), tokens)

    def trip_s(self, tokens: int) -> float:
        """What paging ``tokens`` out and in again takes, or computing them again where that is faster."""
        choice = self._way((self._leg(tokens, self.out_bytes), self._leg(tokens, self.in_bytes)), tokens)
        return min(choice.move_s, choice.recompute_s)

    def keep(
        self, tokens: Sequence[int] | npt.NDArray[Any], rows: RowNumbers, adapter: str, first: int, limit_s: float
    ) -> int:
        """Store the pieces that hold tokens from ``first`` on of a sequence whose token i lies in row ``rows[i]``, as
        far as there is room and ``limit_s`` allows. Returns how many of these are stored now, from the first on without
        a gap."""
        assert self._rows is not None
        start_s = time.perf_counter()
        there = kept = copied_bytes = 0
        space = self._space(adapter)
        chain = PieceChain(space, as_tokens(tokens))
        for piece in chain.pieces(first):
            if not self._has(space, piece):
                late = time.perf_counter() - start_s > limit_s
                if late or not self._keep_one(space, piece, rows, self._rows, self._staging[0]):
                    break
                kept += 1
                copied_bytes += piece_bytes(self._widths, piece.end - piece.first)
            there += 1
        self._count(space, kept)
        self.out_bytes.note(copied_bytes, time.perf_counter() - start_s)
        self._pool.touch(space, chain.pieces())
        return there

    def keep_soon(self, tokens: Sequence[int] | npt.NDArray[Any], rows: RowNumbers, adapter: str, first: int) -> None:
        """As :meth:`keep`, for rows that are about to be given up: they are copied now, and a thread sums and stores
        the copy beside the engine's next steps. The pieces count as stored at once."""
        assert self._rows is not None
        space = self._space(adapter)
        chain = PieceChain(space, as_tokens(tokens))
        pieces = [p for p in chain.pieces(first) if not self._has(space, p)]
        count = sum(p.end - p.first for p in pieces)
        if not pieces or self._soon_bytes + count * sum(self._widths) > _MOST_SOON_BYTES:
            return
        start_s = time.perf_counter()
        copied = CopiedRows(self._rows, np.concatenate([rows[p.first : p.end] for p in pieces]))
        self.out_bytes.note(count * sum(self._widths), time.perf_counter() - start_s)
        with self._guard:
            self._soon_bytes += count * sum(self._widths)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-out")
        done = self._thread.submit(self._keep_copy, space, chain, pieces, rows, copied)
        self._soon.update({(space, piece.file): done for piece in pieces})

    def _keep_copy(
        self, space: str, chain: PieceChain, pieces: Sequence[PieceName], rows: RowNumbers, copied: CopiedRows
    ) -> None:
        kept = 0
        try:
            for piece in pieces:
                kept += self._keep_one(space, piece, rows, copied, self._staging[1])
        finally:
            with self._guard:
                self._soon_bytes -= sum(p.end - p.first for p in pieces) * sum(self._widths)
            self._count(space, kept)
            self._pool.touch(space, chain.pieces())
            for piece in pieces:
                self._soon.pop((space, piece.file), None)

    def _count(self, space: str, kept: int) -> None:
        self.stored_pieces += kept
        if kept and space not in self._spaces:
            self._spaces.add(space)
            self._note(space)

    def _keep_one(self, space: str, piece: PieceName, rows: RowNumbers, pool: PoolRows, staging: PieceStaging) -> bool:
        where = np.ascontiguousarray(rows[piece.first : piece.end])
        nbytes = piece_bytes(self._widths, piece.end - piece.first)

        def write(fd: int) -> None:
            write_piece(FileBytes(fd), pool, where, staging, self._pace)

        def write_lent(place: MemoryBytes, pace: LinkPace) -> None:
            write_piece(place, pool, where, staging, pace)

        try:
            if self._lent is not None and self._lent.put((space, piece.file), nbytes, write_lent):
                return True
            return self._pool.put(space, piece, nbytes, write)
        except (BadPiece, OSError) as error:
            log.warning("KV is not kept: %s", error)
            return False

    def reach(self, tokens: Sequence[int] | npt.NDArray[Any], adapter: str, have: int) -> int:
        """How many of ``tokens`` from the first on are in the pool or among the ``have`` that the engine has; ``have``
        if the others would sooner be computed than brought."""
        chain, space = PieceChain(self._space(adapter), as_tokens(tokens)), self._space(adapter)
        start = have // PIECE_TOKENS * PIECE_TOKENS
        end = have
        while start + PIECE_TOKENS <= len(tokens) and self._has(space, chain.piece(start, start + PIECE_TOKENS)):
            start += PIECE_TOKENS
            end = start
        for piece in chain.shorter(start):
            if piece.end <= end:
                break
            if self._has(space, piece):
                end = piece.end
                break
        more = end - have
        return end if more > 0 and self._choose((self._leg(more, self.in_bytes),), more) else have

    def fetch(
        self, tokens: Sequence[int] | npt.NDArray[Any], adapter: str, have: int, end: int, rows: RowNumbers
    ) -> int:
        """Bring tokens ``have .. end``, an answer of :meth:`reach`, to ``rows``. Returns how far it came: what is gone
        meanwhile or corrupt is computed again, and so is what follows it."""
        assert self._rows is not None
        start_s = time.perf_counter()
        space = self._space(adapter)
        reached = have
        chain = PieceChain(space, as_tokens(tokens[:end]))
        for piece in chain.pieces(have):
            if not self._fetch_one(space, piece, have, rows):
                break
            reached = piece.end
        self._pool.touch(space, chain.pieces())
        self.fetched_tokens += reached - have
        self.in_bytes.note(sum(self._widths) * (reached - have), time.perf_counter() - start_s)
        return reached

    def _fetch_one(self, space: str, piece: PieceName, have: int, rows: RowNumbers) -> bool:
        begin = max(piece.first, have)
        where = np.ascontiguousarray(rows[begin - have : piece.end - have])
        soon = self._soon.get((space, piece.file))
        if soon is not None:
            wait([soon])
        if self._lent is not None:
            with self._lent.opened((space, piece.file)) as lent:
                if lent is not None and self._read(*lent, where, begin - piece.first):
                    return True
            self._lent.drop((space, piece.file))
        with self._pool.opened(space, piece) as fd:
            if fd is None:
                return False
            come = self._read(FileBytes(fd), self._pace, where, begin - piece.first)
        if not come:
            self._pool.drop(space, piece)
        return come

    def _read(self, place: PieceBytes, pace: LinkPace, where: RowNumbers, skip: int) -> bool:
        assert self._rows is not None
        try:
            read_piece(place, self._rows, where, skip, pace)
        except OSError as error:
            log.warning("KV is computed again: %s", error)
            return False
        except BadPiece as error:
            log.warning("KV is computed again: %s", error)
            self.corrupt_pieces += 1
            return False
        return True

    def _has(self, space: str, piece: PieceName) -> bool:
        if (space, piece.file) in self._soon:
            return True
        return (self._lent is not None and self._lent.has((space, piece.file))) or self._pool.has(space, piece)

    def close(self) -> None:
        """The model leaves; what others lent goes to host memory, as far as the time for that allows."""
        end_s = time.perf_counter() + self.leave_s
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._lent is not None:
            self._lent.empty(lambda key, data: self._to_pool(key, data) if time.perf_counter() < end_s else None)
        for space in self._spaces:
            self._note(space)
        self._rows = None

    def step(self) -> None:
        """Between two steps of the engine: what lenders want back goes to host memory."""
        if self._lent is not None:
            self._lent.answer(self._to_pool)

    def _to_pool(self, key: Key, memory: Packed) -> None:
        space, file = key
        piece = PieceName.of_file(int(file[:6], 16), file[7:])

        def write(fd: int) -> None:
            began_s = self._pace.begin()
            FileBytes(fd).write(memory, 0)
            self._pace.copied(len(memory), began_s)

        try:
            self._pool.put(space, piece, len(memory), write)
        except OSError as error:
            log.warning("KV that was lent is not kept: %s", error)

    def _note(self, space: str) -> None:
        cost = 1.0 / max(self.prefill_tokens.per_s, 1e-9) / max(1, sum(self._widths))
        self._pool.note_space(space, SpaceNote(weights=self._weights, recompute_s_per_byte=cost))

    def _space(self, adapter: str) -> str:
        return space_of("kv", PIECE_TOKENS, self._weights, self._widths, adapter)

    def _leg(self, tokens: int, rate: RateEstimate) -> Leg:
        pieces = -(-tokens // PIECE_TOKENS)
        return Leg(tokens * sum(self._widths), rate.per_s, pieces * _PIECE_S)

    def _choose(self, trip: Sequence[Leg], tokens: int) -> bool:
        return self._way(trip, tokens).way is Way.MOVE

    def _way(self, trip: Sequence[Leg], tokens: int) -> WayChoice:
        return choose_way(trip, tokens, self.prefill_tokens.per_s)
