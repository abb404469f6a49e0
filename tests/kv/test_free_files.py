"""Pages of dropped pieces hold the next ones: never those that somebody reads, within the bound, and not for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from prism.kv.free_files import FREE
from prism.kv.host_pool import HostPool, HostPoolUse
from prism.kv.machine_memory import SpareMemory
from prism.kv.piece_file import PieceBytes
from tests.kv.test_host_pool import KIB, SPACE, age, pieces, put, read

BOUND = 16 * KIB
SMALL = KIB // 4
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
    assert use.booked_bytes == use.file_bytes + use.free_bytes <= BOUND
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


def test_pages_of_another_size_go_before_pieces_do(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)
    assert put(pool, NEW[0], 3 * KIB) and exact(pool.use()).free_bytes < 3 * KIB
    assert put(pool, NEW[1], 3 * KIB) and pool.has(SPACE, NEW[0])
    exact(pool.use())


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
    assert (exact(pool.use()).pieces, pool.use().booked_bytes) == (14, 15 * KIB), "two were dropped, one was taken"
    assert put(pool, NEW[0]) and exact(pool.use()).pieces == 15


def write_and_die(directory: Path) -> None:
    def killed(place: PieceBytes) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    HostPool(directory, BOUND).put(SPACE, NEW[0], KIB, killed)


def test_a_writer_that_was_killed_in_pages_that_were_there_gives_them_back(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (exact(pool.use()).pieces, pool.use().booked_bytes) == (14, 15 * KIB)
    assert len(inodes(tmp_path / SPACE)) == 14 and put(pool, NEW[0]) and exact(pool.use()).pieces == 15


def pool_with_free_pages(directory: Path, spare: SpareMemory | None = None) -> HostPool:
    """Of eight small pieces that made room for another one the pages of seven are left."""
    pool = HostPool(directory, BOUND, spare)
    for piece in pieces(64, 3):
        assert put(pool, piece, SMALL)
        age(pool, piece, 100.0)
    assert put(pool, NEW[0], SMALL) and exact(pool.use()).free_bytes == 7 * SMALL
    return pool


def test_pages_that_nobody_takes_are_given_back(tmp_path: Path) -> None:
    pool = pool_with_free_pages(tmp_path)
    pool.tend()
    assert exact(pool.use()).free_bytes == 7 * SMALL, "they were free for a moment"
    for file in (tmp_path / FREE).rglob("*"):
        os.utime(file, (1.0, 1.0))
    pool.tend()
    assert exact(pool.use()).free_bytes == 0 and inodes(tmp_path / FREE) == set() and pool.use().pieces == 57


def test_a_machine_that_runs_short_of_memory_gets_free_pages(tmp_path: Path) -> None:
    left, now_s = [100 * KIB], iter(range(1000))
    pool = pool_with_free_pages(tmp_path, SpareMemory(10 * KIB, lambda: left[0], lambda: next(now_s)))
    left[0] = 10 * KIB - 1
    pool.tend()
    assert exact(pool.use()).free_bytes == 6 * SMALL and pool.use().pieces == 57, "as much as is missing"
    left[0] = 8 * KIB
    assert not put(pool, NEW[1], SMALL), "nothing is kept as long as memory is short"
    assert exact(pool.use()).free_bytes == 0 and pool.use().pieces <= 57 - 2, "and then those of pieces"


def test_a_claim_takes_free_pages_before_pieces(tmp_path: Path) -> None:
    pool = pool_with_free_pages(tmp_path)
    assert pool.claimable_bytes() == BOUND
    claim = pool.claim(7 * SMALL)
    assert claim is not None and pool.use().pieces == 57 and pool.use().free_bytes == 0
    claim.close()


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
    assert 8 <= use.pieces <= 16
