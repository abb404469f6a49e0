"""What a piece of KV is called: by the tokens before it and in it, so that whoever has the same prompt finds it.

::

    tokens   | 0 .. 63 | 64 .. 127 | 128 .. 150 |        pieces of PIECE_TOKENS; the last may be shorter
    names      n0 = H(space, t0..63)   n1 = H(n0, t64..127)   n2 = H(n1, t128..150)

The *space* stands for all that must be equal beside the tokens: the weights, how they are split, the row's layout, the
adapter. A hash of 128 bits of a sequence that others chose: BLAKE2b, which is not known to collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

PIECE_TOKENS: Final = 64
_DIGEST_BYTES: Final = 16
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PieceName:
    """Tokens ``first .. end`` of a sequence; ``key`` names them and all before them."""

    key: str
    first: int
    end: int

    @property
    def position(self) -> int:
        return self.first // PIECE_TOKENS

    @classmethod
    def of_file(cls, position: int, key: str) -> PieceName:
        """The piece as far as its file's name tells: its end is not in it."""
        return cls(key, position * PIECE_TOKENS, (position + 1) * PIECE_TOKENS)

    @property
    def file(self) -> str:
        return f"{self.position:06x}-{self.key}"


def as_tokens(tokens: Sequence[int] | npt.NDArray[Any]) -> Tokens:
    return np.asarray(tokens, dtype=np.int32)


def space_of(*parts: object) -> str:
    """The name of the space in which ``parts`` (of text without line feeds) are what they are."""
    return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=_DIGEST_BYTES).hexdigest()


class PieceChain:
    """The names of one sequence's pieces, computed as far as they are asked for."""

    def __init__(self, space: str, tokens: Tokens) -> None:
        self._tokens = np.ascontiguousarray(tokens, dtype="<i4")
        self._states = [bytes.fromhex(space)]

    def pieces(self, first: int = 0) -> Iterator[PieceName]:
        """All pieces from the one that holds token ``first`` on; the last may be shorter than the others."""
        start = first // PIECE_TOKENS * PIECE_TOKENS
        while start < len(self._tokens):
            yield self.piece(start, min(start + PIECE_TOKENS, len(self._tokens)))
            start += PIECE_TOKENS

    def shorter(self, start: int) -> Iterator[PieceName]:
        """The pieces at ``start`` that are shorter than PIECE_TOKENS and lie within the sequence, longest first."""
        longest = min(PIECE_TOKENS - 1, len(self._tokens) - start)
        for count in range(longest, 0, -1):
            yield self.piece(start, start + count)

    def piece(self, start: int, end: int) -> PieceName:
        """Tokens ``start .. end``, ``start`` a multiple of PIECE_TOKENS."""
        key = self._step(self._state(start // PIECE_TOKENS), start, end)
        return PieceName(key.hex(), start, end)

    def _state(self, position: int) -> bytes:
        while len(self._states) <= position:
            start = (len(self._states) - 1) * PIECE_TOKENS
            self._states.append(self._step(self._states[-1], start, start + PIECE_TOKENS))
        return self._states[position]

    def _step(self, state: bytes, start: int, end: int) -> bytes:
        return hashlib.blake2b(state + self._tokens[start:end].tobytes(), digest_size=_DIGEST_BYTES).digest()
