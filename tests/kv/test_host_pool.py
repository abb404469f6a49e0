"""The machine's pool: within its bound, whole pieces or none, and right again after any death."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from prism.kv.host_pool import HostPool
from prism.kv.machine_memory import SpareMemory
from prism.kv.naming import PieceChain, PieceName, as_tokens, space_of
from prism.kv.piece_file import PieceBytes
from prism.kv.pool_directory import SpaceNote
from prism.memory._kvcached import rehearse_deaths
from tests.kv.stored import stored, writing

KIB = 1 << 10
SPACE, OTHER = space_of("a"), space_of("b")
NOW_S = time.time()


def pieces(count: int, seed: int = 0, space: str = SPACE) -> list[PieceName]:
    return list(PieceChain(space, as_tokens([seed] + [1] * (64 * count - 1))).pieces())


def writes(content: bytes) -> Callable[[PieceBytes], None]:
    return lambda place: place.write(np.frombuffer(content, dtype=np.uint8), 0)


def put(pool: HostPool, piece: PieceName, nbytes: int = KIB, space: str = SPACE) -> bool:
    return pool.put(space, piece, nbytes, writes(bytes([piece.position % 256]) * nbytes))


def read(pool: HostPool, piece: PieceName, space: str = SPACE) -> bytes | None:
    with pool.opened(space, piece) as place:
        return None if place is None else bytes(place.memory)


def age(pool: HostPool, piece: PieceName, seconds: float, space: str = SPACE) -> None:
    pool.touch(space, [piece], NOW_S - seconds)


def test_what_is_put_is_found_by_every_engine(tmp_path: Path) -> None:
    pool, other = HostPool(tmp_path, 10 * KIB), HostPool(tmp_path, 10 * KIB)
    a, b = pieces(2)
    assert put(pool, a) and other.has(SPACE, a) and read(other, a) == b"\0" * KIB
    assert not other.has(SPACE, b) and read(other, b) is None and not other.has(OTHER, a)
    assert put(other, a), "it is there already"
    assert (pool.use().pieces, pool.use().booked_bytes, pool.use().file_bytes) == (1, KIB, KIB)
    other.drop(SPACE, a)
    assert not pool.has(SPACE, a) and pool.use().booked_bytes == 0


def test_the_bound_holds_and_what_saves_least_goes(tmp_path: Path) -> None:
    pool = HostPool(tmp_path, 4 * KIB)
    old, dear = pieces(2, 1), pieces(1, 2, OTHER)
    for piece in old:
        assert put(pool, piece)
        age(pool, piece, 100.0)
    assert put(pool, dear[0], space=OTHER)
    pool.note_space(OTHER, SpaceNote(weights="w tp1", recompute_s_per_byte=1.0))
    assert pool.spaces("w") == [OTHER] and pool.note(SPACE) == SpaceNote()
    age(pool, dear[0], 100.0, OTHER)
    new = pieces(2, 3)
    assert put(pool, new[0]) and put(pool, new[1])
    assert [pool.has(SPACE, p) for p in (*old, *new)] == [True, False, True, True], "the end of the oldest sequence"
    assert pool.has(OTHER, dear[0])
    assert not put(pool, pieces(1, 4)[0], 4 * KIB + 1) and pool.use().pieces == 4


def test_a_piece_that_is_used_is_young_again(tmp_path: Path) -> None:
    pool = HostPool(tmp_path, 2 * KIB)
    first, second = pieces(1, 1)[0], pieces(1, 2)[0]
    for piece in (first, second):
        put(pool, piece)
        age(pool, piece, 1000.0)
    pool.touch(SPACE, [first, pieces(1, 9)[0]])
    put(pool, pieces(1, 3)[0])
    assert pool.has(SPACE, first) and not pool.has(SPACE, second)


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    pool = HostPool(tmp_path, 4 * KIB)
    piece = pieces(1)[0]

    def full(place: PieceBytes) -> None:
        writes(b"half")(place)
        raise OSError(28, "no space")

    def wrong(place: PieceBytes) -> None:
        raise ZeroDivisionError

    assert not pool.put(SPACE, piece, KIB, full)
    with pytest.raises(ZeroDivisionError):
        pool.put(SPACE, piece, KIB, wrong)
    assert not stored(pool) and not writing(pool) and pool.use().booked_bytes == 0
    assert put(pool, piece)


def write_and_die(directory: Path) -> None:
    def killed(place: PieceBytes) -> None:
        writes(b"x" * KIB)(place)
        os.kill(os.getpid(), signal.SIGKILL)

    HostPool(directory, 4 * KIB).put(SPACE, pieces(1)[0], 3 * KIB, killed)


def test_a_killed_writers_room_is_found_again(tmp_path: Path) -> None:
    pool = HostPool(tmp_path, 4 * KIB)
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert writing(pool) == 1 and not pool.has(SPACE, pieces(1)[0])
    assert all(put(pool, piece) for piece in pieces(4, 7)), "the bound has room for four"
    assert (pool.use().pieces, pool.use().booked_bytes) == (4, 4 * KIB)


def test_many_writers_stay_within_the_bound(tmp_path: Path) -> None:
    def work(seed: int) -> None:
        pool = HostPool(tmp_path, 20 * KIB)
        for piece in pieces(10, seed):
            put(pool, piece)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    use = HostPool(tmp_path, 20 * KIB).use()
    assert use.file_bytes == use.booked_bytes <= 20 * KIB


def test_a_machine_that_runs_short_of_memory_gets_that_of_pieces(tmp_path: Path) -> None:
    left, now_s = [100 * KIB], iter(range(1000))
    pool = HostPool(tmp_path, 50 * KIB, SpareMemory(10 * KIB, lambda: left[0], lambda: next(now_s)))
    first = pieces(20)
    for piece in first[:18]:
        assert put(pool, piece)
    for piece in first[:18]:
        age(pool, piece, 100.0)
    left[0] = 2 * KIB  # eight less than what is to stay free
    assert not put(pool, first[18]), "nothing is kept as long as memory is short"
    assert pool.use().pieces <= 18 - 9 and pool.has(SPACE, first[0]), "the ends go first"
    left[0] = 100 * KIB
    assert put(pool, first[18])
    assert pool.use().booked_bytes == pool.use().file_bytes


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_a_full_file_system_is_no_room_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    pool = HostPool(tmp_path, 10 * KIB)
    a, b = pieces(2)
    assert put(pool, a)

    def full(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    try:
        rehearse_deaths(0, code)
        assert not pool.put(SPACE, b, KIB, writes(b"x" * KIB)) and pool.use().booked_bytes == KIB
        with pytest.raises(OSError, match=os.strerror(code)):
            HostPool(tmp_path / "other", 10 * KIB)
    finally:
        rehearse_deaths(0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        pool.note_space(SPACE, SpaceNote(weights="w"))
    assert pool.note(SPACE) == SpaceNote() and read(pool, a) == b"\0" * KIB
    assert put(pool, b) and put(HostPool(tmp_path / "other", 10 * KIB), b)
