"""What lies in a machine's pool, and harm to it."""

from __future__ import annotations

import numpy as np

from prism.kv.host_pool import HostPool
from prism.kv.naming import PieceName
from prism.policy.moving import StoredPiece


def stored(pool: HostPool, position: int | None = None) -> list[StoredPiece]:
    """All complete pieces (at this position of their sequences), by name."""
    found = sorted(pool.pieces(), key=lambda piece: piece.name)
    return [piece for piece in found if position in (None, piece.position)]


def named(piece: StoredPiece) -> tuple[str, PieceName]:
    space, _, file = piece.name.partition("/")
    position, _, key = file.partition("-")
    return space, PieceName.of_file(int(position, 16), key)


def spoil(pool: HostPool, piece: StoredPiece, at: int = -1) -> None:
    """Changes a byte of it."""
    with pool.opened(*named(piece)) as place:
        assert place is not None
        place.memory[at] ^= 255


def forget(pool: HostPool, piece: StoredPiece) -> None:
    pool.drop(*named(piece))


def spoil_claims(pool: HostPool) -> None:
    """Writes over the beginning of everything in the pool."""
    memory = np.from_dlpack(pool._index.memory())
    memory[:2] = 120


def writing(pool: HostPool) -> int:
    """Pieces that are being written, by dead ones, too, as long as nobody has looked."""
    return pool._index.books()[3]
