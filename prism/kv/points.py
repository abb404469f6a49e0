"""What belongs to one point of a sequence: the rows that layers with a sliding window keep of the tokens before it, or
the state of linear attention behind it (W = 1).

::

    tokens            | 0 ................................. e-1 |      pieces by PIECE_TOKENS (prism.kv.keeper)
    the point e                          | e-W ......... e-1 |      W rows, or all if there are fewer

A sequence that is brought back up to token ``e`` goes on only if the point ``e`` is there. It is named like the piece
of tokens that ends there, so that whoever has the same tokens finds it, in a space of its own. It is stored where a
sequence ends; and where its rows reach far enough back, at the last end of a whole piece, too, up to which sequences
that go apart have their pieces in common.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from prism.kv.naming import PIECE_TOKENS, PieceChain, PieceName, as_tokens
from prism.kv.piece_store import Piece, PieceStore
from prism.memory.rows import PoolRows, RowNumbers

_ALL_ENDS: Final = 2 * PIECE_TOKENS
"""Among the last tokens a point is looked for behind every one, before them behind whole pieces only."""
_PART_BYTES: Final = 64 << 20
"""A point that is larger is stored in several pieces: what waits to be stored is bounded, and so is a piece."""


class PointShelf:
    """The points of one keeper. Same threads."""

    def __init__(
        self,
        store: PieceStore,
        rows: PoolRows,
        most_rows: int,
        rows_of: Callable[[RowNumbers], RowNumbers],
        space: Callable[[str, int], str],
        stored: Callable[[str, int], None],
    ) -> None:
        """``rows_of``: these rows by the rows of tokens, 0 for one that has none (any more). ``space`` names that of an
        adapter and a part; ``stored`` is told how many more pieces are in one."""
        self._store, self._rows, self._rows_of = store, rows, rows_of
        self._space, self._stored = space, stored
        self.most_rows = most_rows
        self.width = sum(column.width for column in rows.columns)
        """Bytes of a row."""
        self._part_rows = max(1, _PART_BYTES // max(1, self.width))

    def first(self, end: int) -> int:
        """The first token whose row belongs to the point ``end``."""
        return max(0, end - self.most_rows)

    def keep(self, tokens: Sequence[int] | npt.NDArray[Any], rows: RowNumbers, adapter: str, soon: bool = False) -> int:
        """Store the point behind ``tokens``, and the last one behind a whole piece, of a sequence whose token i lies in
        ``rows[i]``. ``soon``: the rows are about to be given up. Returns the bytes that were copied."""
        chains = self._chains(tokens, adapter)
        copied: dict[str, list[Piece]] = {}
        for end in _last_ends(len(tokens)):
            mine = self._rows_of(rows[self.first(end) : end])
            if np.all(mine > 0):
                for part, first, last in self._parts(end):
                    space, name = chains(part, end)
                    if not self._store.has(space, name):
                        piece = Piece(space, name, mine[first - self.first(end) : last - self.first(end)])
                        copied.setdefault(space, []).append(piece)
        for space, pieces in copied.items():
            if soon:
                self._store.put_soon(pieces, self._rows, functools.partial(self._stored, space))
            else:
                self._stored(space, sum(self._store.put(piece, self._rows) for piece in pieces))
        return sum(len(piece.rows) for pieces in copied.values() for piece in pieces) * self.width

    def last(self, tokens: Sequence[int] | npt.NDArray[Any], adapter: str, have: int, end: int) -> int:
        """The last point behind ``have`` and not behind ``end`` tokens that is stored; ``have``: there is none."""
        chains = self._chains(tokens[:end], adapter)
        for point in _ends_before(have, end):
            if all(self._store.has(*chains(part, point)) for part, _, _ in self._parts(point)):
                return point
        return have

    def fetch(self, tokens: Sequence[int] | npt.NDArray[Any], adapter: str, end: int, rows: RowNumbers) -> bool:
        """Bring what the last ``len(rows)`` tokens have of the point ``end`` to where tokens in ``rows`` have it.
        False: it is gone or corrupt."""
        chains, mine, begin = self._chains(tokens[:end], adapter), self._rows_of(rows), end - len(rows)
        for part, first, last in self._parts(end):
            if last > begin:
                space, name = chains(part, end)
                piece = Piece(space, name, mine[max(first, begin) - begin : last - begin])
                if not self._store.bring(piece, self._rows, max(0, begin - first)):
                    return False
                self._store.pool.touch(space, [name])
        return True

    def _parts(self, end: int) -> Iterator[tuple[int, int, int]]:
        """Number, first token and end of the pieces that the point ``end`` is stored in."""
        for part, first in enumerate(range(self.first(end), end, self._part_rows)):
            yield part, first, min(first + self._part_rows, end)

    def _chains(
        self, tokens: Sequence[int] | npt.NDArray[Any], adapter: str
    ) -> Callable[[int, int], tuple[str, PieceName]]:
        """Space and name of a part of the point behind so many of ``tokens``."""
        chains: dict[int, tuple[str, PieceChain]] = {}
        numbers = as_tokens(tokens)

        def named(part: int, end: int) -> tuple[str, PieceName]:
            if part not in chains:
                space = self._space(adapter, part)
                chains[part] = space, PieceChain(space, numbers)
            space, chain = chains[part]
            return space, chain.piece((end - 1) // PIECE_TOKENS * PIECE_TOKENS, end)

        return named


def _last_ends(count: int) -> Iterator[int]:
    if count > 0:
        yield count
    if count > PIECE_TOKENS and count % PIECE_TOKENS:
        yield count // PIECE_TOKENS * PIECE_TOKENS


def _ends_before(have: int, end: int) -> Iterator[int]:
    every = max(have, end - _ALL_ENDS)
    yield from range(end, every, -1)
    yield from range(every // PIECE_TOKENS * PIECE_TOKENS, have, -PIECE_TOKENS)
