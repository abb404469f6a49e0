"""A full pool writes into the files of what it drops: never of what somebody reads, within the bound, whoever dies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from prism.kv.host_pool import HostPool, HostPoolUse
from prism.kv.machine_memory import SpareMemory
from prism.kv.piece_file import PieceBytes
from tests.kv.test_host_pool import KIB, OTHER, SPACE, age, pieces, put, read

BOUND = 16 * KIB
OLD, NEW = pieces(16, 1), pieces(40, 2)


def full_pool(directory: Path, spare: SpareMemory | None = None) -> HostPool:
    """Sixteen pieces that nobody has used for long."""
    pool = HostPool(directory, BOUND, spare)
    for piece in OLD:
        assert put(pool, piece)
        age(pool, piece, 100.0)
    return pool


def inodes(directory: Path) -> set[int]:
    return {file.stat().st_ino for file in directory.rglob("*") if file.is_file()}


def exact(use: HostPoolUse) -> HostPoolUse:
    assert use.booked_bytes == use.file_bytes <= BOUND
    return use


def test_a_full_pool_writes_into_the_pages_of_what_it_drops(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)
    before = inodes(tmp_path)
    for number, piece in enumerate(NEW[:12]):
        assert put(pool, piece) and read(pool, piece) == bytes([piece.position]) * KIB
        assert inodes(tmp_path) == before, "no file was made, and none is gone"
        assert not pool.has(SPACE, OLD[15 - number]), "its end goes first"
        assert exact(pool.use()).booked_bytes == BOUND
    assert all(read(pool, piece) == bytes([piece.position]) * KIB for piece in (*OLD[:4], *NEW[:12]))


def test_a_piece_of_another_size_takes_no_more_than_it_needs(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)
    assert put(pool, NEW[0], 3 * KIB) and exact(pool.use()).pieces == 14
    assert put(pool, NEW[1], KIB // 2) and exact(pool.use()).pieces == 14
    assert put(pool, NEW[2], 3 * KIB) and [pool.has(SPACE, piece) for piece in NEW[:3]] == [True] * 3
    exact(pool.use())


def test_of_pieces_that_are_about_to_go_one_of_the_same_size_is_first(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)
    assert put(pool, NEW[0], KIB // 2)
    age(pool, NEW[0], 1000.0)
    assert put(pool, pieces(1, 3)[0], KIB // 2)
    before = inodes(tmp_path)
    pool = HostPool(tmp_path, BOUND)
    assert put(pool, pieces(1, 4)[0]) and inodes(tmp_path) == before and pool.has(SPACE, NEW[0])


def test_a_piece_that_was_used_since_all_were_looked_at_stays(tmp_path: Path) -> None:
    pool, other = full_pool(tmp_path), HostPool(tmp_path, BOUND)
    assert put(pool, NEW[0]) and not pool.has(SPACE, OLD[15])
    other.touch(SPACE, [OLD[14]])
    assert put(pool, NEW[1]) and pool.has(SPACE, OLD[14]) and not pool.has(SPACE, OLD[13])
    other.drop(SPACE, OLD[12])
    assert put(pool, NEW[2]) and put(pool, NEW[3]) and not pool.has(SPACE, OLD[11])
    assert exact(pool.use()).pieces == 16


def test_who_reads_a_piece_that_is_dropped_reads_it_to_its_end(tmp_path: Path) -> None:
    pool, other = full_pool(tmp_path), HostPool(tmp_path, BOUND)
    last = OLD[-1]
    with other.opened(SPACE, last) as place:
        assert place is not None
        for piece in NEW[:8]:
            assert put(pool, piece)
        assert not pool.has(SPACE, last)
        assert bytes(place.memory) == bytes([last.position]) * KIB
    assert read(other, last) is None
    exact(pool.use())


def test_pages_go_at_once_though_another_process_has_them_mapped(tmp_path: Path) -> None:
    pool, other = full_pool(tmp_path), HostPool(tmp_path, BOUND)
    assert read(other, OLD[0]) is not None
    fd = os.open(tmp_path / SPACE / OLD[0].file, os.O_RDONLY)
    pool.drop(SPACE, OLD[0])
    assert os.fstat(fd).st_size == 0 and read(other, OLD[0]) is None
    os.close(fd)


def test_what_fails_in_pages_that_were_there_leaves_nothing(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)

    def full(place: PieceBytes) -> None:
        raise OSError(28, "no space")

    assert not pool.put(SPACE, NEW[0], KIB, full)
    assert (exact(pool.use()).pieces, pool.use().booked_bytes) == (15, 15 * KIB)
    assert put(pool, NEW[0]) and exact(pool.use()).pieces == 16


def test_a_machine_that_runs_short_of_memory_gets_that_of_pieces_between_them(tmp_path: Path) -> None:
    left, now_s = [100 * KIB], iter(range(1000))
    pool = full_pool(tmp_path, SpareMemory(10 * KIB, lambda: left[0], lambda: next(now_s)))
    pool.tend()
    assert exact(pool.use()).pieces == 16
    left[0] = 10 * KIB - 1
    pool.tend()
    assert exact(pool.use()).pieces < 16 and pool.has(SPACE, OLD[0])


def test_nobody_reads_what_is_written_for_others(tmp_path: Path) -> None:
    """Four threads that write and read a pool which holds a third of their pieces."""

    def work(seed: int) -> None:
        pool, draw = HostPool(tmp_path, BOUND), np.random.default_rng(seed)
        for _ in range(300):
            piece = NEW[int(draw.integers(len(NEW)))]
            assert read(pool, piece) in (None, bytes([piece.position]) * KIB)
            put(pool, piece)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    use = exact(HostPool(tmp_path, BOUND).use())
    assert use.pieces == 16


def asks_or_writes(of: object) -> bool:
    """Whether a function asks the system for something, or writes to memory that others see."""
    return getattr(of, "__module__", "") in ("posix", "fcntl") or getattr(of, "__name__", "") in ("pack_into", "copyto")


def killed_at(call: int, work: Callable[[], object]) -> bool:
    """Runs ``work`` in a child that dies before or behind such a call, the ``call``-th of these moments. False: it
    ended before."""
    child = os.fork()
    if child == 0:
        left = call

        def profile(_frame: FrameType, event: str, of: object) -> None:
            nonlocal left
            left -= event in ("c_call", "c_return") and asks_or_writes(of)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(profile)
            work()
        finally:
            sys.setprofile(None)
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("nbytes", [KIB, 3 * KIB // 2], ids=["into a piece's file", "into a new one"])
def test_a_writer_may_be_killed_at_every_call(tmp_path: Path, nbytes: int) -> None:
    """Before and behind everything that it asks of the system or writes: whole pieces are left, the books are right
    again after a count, and nobody waits for the dead one's locks."""
    pool, calls = full_pool(tmp_path), 0
    for piece in OLD:
        assert read(pool, piece)  # so that a child has them mapped, as an engine that goes on has
    while True:
        calls += 1
        newest = pieces(1, 100 + calls)[0]
        if not killed_at(calls, lambda: put(HostPool(tmp_path, BOUND), newest, nbytes, OTHER)):  # noqa: B023
            break
        fresh = HostPool(tmp_path, BOUND)
        use = exact(fresh.use())
        assert use.pieces >= 14 and len(list(tmp_path.rglob(".part-*"))) == 0, calls
        for stored in (*fresh.pieces(SPACE), *fresh.pieces(OTHER)):
            content = (tmp_path / stored.name).read_bytes()
            assert len(content) == stored.nbytes and content == bytes([stored.position]) * len(content), calls
        for stored in fresh.pieces(OTHER):
            (tmp_path / stored.name).unlink()
        fresh.use()
        for piece in OLD:
            if not fresh.has(SPACE, piece):
                assert put(fresh, piece)
            age(fresh, piece, 100.0)
    assert calls > 30 and pool.has(OTHER, newest)
