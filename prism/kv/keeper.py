"""One engine's keeper of KV outside its arena: stores pieces of its sequences, finds them again, brings them back.

What it stores goes to host memory (:mod:`prism.kv.host_pool`), where every engine of the machine that runs the same
weights in the same way finds it by the tokens. Moving and computing again are compared by estimated time each time
(:func:`prism.policy.moving.choose_way`), with rates measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy.typing as npt

from prism.kv.host_pool import HostPool
from prism.kv.lent_shelf import LentShelf
from prism.kv.naming import PIECE_TOKENS, PieceChain, as_tokens, space_of
from prism.kv.piece_store import Piece, PieceStore
from prism.kv.points import PointShelf
from prism.kv.pool_directory import SpaceNote
from prism.memory.rows import PoolRows, RowNumbers
from prism.policy.moving import Leg, Way, WayChoice, choose_way

_FIRST_GUESS_BYTES_S: Final = 2e9
_PIECE_S: Final = 3e-5
"""What a piece costs whatever its size: names, books, two changes of the pool's index."""
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
        self._weights = weights
        self._store = PieceStore(pool, lent, link_bytes_per_s)
        self._rows: PoolRows | None = None
        self._width = 0
        self._points: PointShelf | None = None
        guess = (0.0 if lent is None else lent.bytes_per_s) or link_bytes_per_s or _FIRST_GUESS_BYTES_S
        self.out_bytes, self.in_bytes = RateEstimate(guess), RateEstimate(guess)
        self.prefill_tokens = RateEstimate(prefill_tokens_per_s)
        self._spaces: set[str] = set()
        """In which something was stored."""
        self.stored_pieces = self.fetched_tokens = 0

    def attach(self, rows: PoolRows) -> None:
        """The rows that are moved from now on."""
        self._rows = rows
        self._width = sum(column.width for column in rows.columns)

    def attach_points(
        self, kind: str, rows: PoolRows, most_rows: int, rows_of: Callable[[RowNumbers], RowNumbers]
    ) -> None:
        """From now on rows of another pool that belong to one point of a sequence move, too (:mod:`prism.kv.points`),
        at most ``most_rows`` for a point. ``rows_of`` says which they are by the rows of :meth:`attach`, 0 for a token
        without one. ``kind`` is what such points are called."""

        def space(adapter: str, part: int) -> str:
            return space_of(kind, part, PIECE_TOKENS, most_rows, self._weights, _widths(rows), adapter)

        self._points = PointShelf(self._store, rows, most_rows, rows_of, space, self._count)

    @property
    def attached(self) -> bool:
        return self._rows is not None

    @property
    def corrupt_pieces(self) -> int:
        return self._store.corrupt_pieces

    def note_prefill(self, tokens: int, took_s: float) -> None:
        """A prefill of so many tokens took so long."""
        self.prefill_tokens.note(tokens, took_s)

    def keep_is_worth(self, tokens: int) -> bool:
        """Whether storing ``tokens`` and bringing them back takes less than computing them again."""
        return self._choose((self._leg(tokens, self.out_bytes), self._leg(tokens, self.in_bytes)), tokens)

    def bringing_is_worth(self, tokens: int) -> bool:
        """Whether ``tokens`` that are stored are brought sooner than computed."""
        return self._choose((self._leg(tokens, self.in_bytes),), tokens)

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
        for name in chain.pieces(first):
            if not self._store.has(space, name):
                late = time.perf_counter() - start_s > limit_s
                if late or not self._store.put(Piece(space, name, rows[name.first : name.end]), self._rows):
                    break
                kept += 1
                copied_bytes += self._width * (name.end - name.first)
            there += 1
        self._count(space, kept)
        if self._points is not None and time.perf_counter() - start_s <= limit_s:
            copied_bytes += self._points.keep(tokens, rows, adapter)
        self.out_bytes.note(copied_bytes, time.perf_counter() - start_s)
        self._store.pool.touch(space, chain.pieces())
        return there

    def keep_soon(self, tokens: Sequence[int] | npt.NDArray[Any], rows: RowNumbers, adapter: str, first: int) -> None:
        """As :meth:`keep`, for rows that are about to be given up: they are copied now, and a thread sums and stores
        the copy beside the engine's next steps. The pieces count as stored at once."""
        assert self._rows is not None
        space = self._space(adapter)
        chain = PieceChain(space, as_tokens(tokens))
        names = [name for name in chain.pieces(first) if not self._store.has(space, name)]

        def done(kept: int) -> None:
            self._count(space, kept)
            self._store.pool.touch(space, chain.pieces())

        if names:
            pieces = [Piece(space, name, rows[name.first : name.end]) for name in names]
            took_s = self._store.put_soon(pieces, self._rows, done)
            self.out_bytes.note(sum(len(piece.rows) for piece in pieces) * self._width, took_s)
        self.keep_point(tokens, rows, adapter)

    def keep_point(self, tokens: Sequence[int] | npt.NDArray[Any], rows: RowNumbers, adapter: str) -> None:
        """As :meth:`keep_soon` for what belongs to the point behind ``tokens`` alone, if there is such."""
        if self._points is not None:
            self._points.keep(tokens, rows, adapter, soon=True)

    def _count(self, space: str, kept: int) -> None:
        self.stored_pieces += kept
        if kept and space not in self._spaces:
            self._spaces.add(space)
            self._note(space)

    def reach(self, tokens: Sequence[int] | npt.NDArray[Any], adapter: str, have: int) -> int:
        """How many of ``tokens`` from the first on are in the pool or among the ``have`` that the engine has, up to a
        point that is stored, too; ``have`` if the others would sooner be computed than brought."""
        space = self._space(adapter)
        chain = PieceChain(space, as_tokens(tokens))
        start = have // PIECE_TOKENS * PIECE_TOKENS
        end = have
        while start + PIECE_TOKENS <= len(tokens) and self._store.has(space, chain.piece(start, start + PIECE_TOKENS)):
            start += PIECE_TOKENS
            end = start
        for piece in chain.shorter(start):
            if piece.end <= end:
                break
            if self._store.has(space, piece):
                end = piece.end
                break
        if self._points is not None:
            end = self._points.last(tokens, adapter, have, end)
        return end if end > have and self.bringing_is_worth(end - have) else have

    def point_tokens(self, have: int, end: int) -> int:
        """Of tokens ``have .. end`` so many of the last need a row of the point ``end``."""
        return 0 if self._points is None else end - max(have, self._points.first(end))

    def fetch(
        self, tokens: Sequence[int] | npt.NDArray[Any], adapter: str, have: int, end: int, rows: RowNumbers
    ) -> int:
        """Bring tokens ``have .. end``, an answer of :meth:`reach`, to ``rows``. Returns how far it came: what is gone
        meanwhile or corrupt is computed again, and so is what follows it; all of it, where a point is needed."""
        assert self._rows is not None
        start_s = time.perf_counter()
        space = self._space(adapter)
        reached = have
        chain = PieceChain(space, as_tokens(tokens[:end]))
        for name in chain.pieces(have):
            begin = max(name.first, have)
            piece = Piece(space, name, rows[begin - have : name.end - have])
            if not self._store.bring(piece, self._rows, begin - name.first):
                break
            reached = name.end
        if self._points is not None:
            needed = self.point_tokens(have, end)
            come = reached == end and self._points.fetch(tokens, adapter, end, rows[end - have - needed :])
            reached = end if come else have
        self._store.pool.touch(space, chain.pieces())
        self.fetched_tokens += reached - have
        self.in_bytes.note(self._width * (reached - have), time.perf_counter() - start_s)
        return reached

    def close(self) -> None:
        """The model leaves; what others lent goes to host memory, as far as the time for that allows."""
        self._store.close(self.leave_s)
        for space in self._spaces:
            self._note(space)
        self._rows = self._points = None

    def step(self) -> None:
        """Between two steps of the engine: what lenders want back goes to host memory."""
        self._store.answer()

    def _note(self, space: str) -> None:
        # Points are worth as much a byte as the tokens without which they are nothing.
        cost = 1.0 / max(self.prefill_tokens.per_s, 1e-9) / max(1, self._width)
        self._store.pool.note_space(space, SpaceNote(weights=self._weights, recompute_s_per_byte=cost))

    def _space(self, adapter: str) -> str:
        assert self._rows is not None
        return space_of("kv", PIECE_TOKENS, self._weights, _widths(self._rows), adapter)

    def _leg(self, tokens: int, rate: RateEstimate) -> Leg:
        pieces = -(-tokens // PIECE_TOKENS)
        nbytes = tokens * self._width
        if self._points is not None:
            nbytes += min(tokens, self._points.most_rows) * self._points.width
            pieces += 1
        return Leg(nbytes, rate.per_s, pieces * _PIECE_S)

    def _choose(self, trip: Sequence[Leg], tokens: int) -> bool:
        return self._way(trip, tokens).way is Way.MOVE

    def _way(self, trip: Sequence[Leg], tokens: int) -> WayChoice:
        return choose_way(trip, tokens, self.prefill_tokens.per_s)


def _widths(rows: PoolRows) -> tuple[int, ...]:
    return tuple(column.width for column in rows.columns)
