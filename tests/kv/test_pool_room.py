"""A full pool writes where what it drops lies: never over what somebody reads, within the bound, whoever dies."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from prism.kv.host_pool import HostPool, HostPoolUse
from prism.kv.machine_memory import SpareMemory
from prism.kv.piece_file import PieceBytes
from tests.kv.test_host_pool import KIB, SPACE, age, pieces, put, read

BOUND = 16 * KIB
OLD, NEW = pieces(16, 1), pieces(40, 2)


def full_pool(directory: Path, spare: SpareMemory | None = None) -> HostPool:
    """Sixteen pieces that nobody has used for long."""
    pool = HostPool(directory, BOUND, spare)
    for piece in OLD:
        assert put(pool, piece)
        age(pool, piece, 100.0)
    return pool


def pages(directory: Path) -> int:
    """Of memory that pieces have: each has one."""
    return (directory / "pieces").stat().st_blocks * 512 // 4096


def exact(use: HostPoolUse) -> HostPoolUse:
    assert use.booked_bytes == use.file_bytes <= BOUND
    return use


def test_a_full_pool_writes_into_the_pages_of_what_it_drops(shared: Path) -> None:
    pool = full_pool(shared)
    with pool.opened(SPACE, OLD[15]) as there:
        assert there is not None
        address = there.memory.ctypes.data
    for number, piece in enumerate(NEW[:12]):
        assert put(pool, piece) and read(pool, piece) == bytes([piece.position]) * KIB
        assert pages(shared) == 16
        assert not pool.has(SPACE, OLD[15 - number]), "its end goes first"
        assert exact(pool.use()).booked_bytes == BOUND
    with pool.opened(SPACE, NEW[0]) as here:
        assert here is not None
        assert here.memory.ctypes.data == address
    assert all(read(pool, piece) == bytes([piece.position]) * KIB for piece in (*OLD[:4], *NEW[:12]))


def test_a_piece_of_another_size_takes_no_more_than_it_needs(tmp_path: Path) -> None:
    pool = full_pool(tmp_path)
    assert put(pool, NEW[0], 3 * KIB) and exact(pool.use()).pieces == 14
    assert put(pool, NEW[1], KIB // 2) and exact(pool.use()).pieces == 14
    assert put(pool, NEW[2], 3 * KIB) and [pool.has(SPACE, piece) for piece in NEW[:3]] == [True] * 3
    exact(pool.use())


def test_of_pieces_that_are_about_to_go_one_of_the_same_size_is_first(shared: Path) -> None:
    pool = full_pool(shared)
    assert put(pool, NEW[0], KIB // 2)
    age(pool, NEW[0], 1000.0)
    assert put(pool, pieces(1, 3)[0], KIB // 2)
    before = pages(shared)
    pool = HostPool(shared, BOUND)
    assert put(pool, pieces(1, 4)[0]) and pages(shared) == before and pool.has(SPACE, NEW[0])


def test_a_piece_that_was_used_since_all_were_looked_at_stays(tmp_path: Path) -> None:
    pool, other = full_pool(tmp_path), HostPool(tmp_path, BOUND)
    assert put(pool, NEW[0]) and not pool.has(SPACE, OLD[15])
    other.touch(SPACE, [OLD[14]])
    assert put(pool, NEW[1]) and pool.has(SPACE, OLD[14]) and not pool.has(SPACE, OLD[13])
    other.drop(SPACE, OLD[12])
    assert put(pool, NEW[2]) and put(pool, NEW[3]) and not pool.has(SPACE, OLD[11])
    assert exact(pool.use()).pieces == 16


def test_who_reads_a_piece_that_is_dropped_reads_it_to_its_end(shared: Path) -> None:
    pool, other = full_pool(shared), HostPool(shared, BOUND)
    last = OLD[-1]
    with other.opened(SPACE, last) as place, other.opened(SPACE, last) as again:
        assert place is not None and again is not None
        for piece in NEW[:8]:
            assert put(pool, piece)
        assert not pool.has(SPACE, last)
        assert bytes(place.memory) == bytes(again.memory) == bytes([last.position]) * KIB
        assert pages(shared) == 17
    assert read(other, last) is None and pages(shared) == 16
    exact(pool.use())


def test_pages_go_at_once_though_another_process_has_them_mapped(shared: Path) -> None:
    pool, other = full_pool(shared), HostPool(shared, BOUND)
    assert read(other, OLD[0]) is not None
    pool.drop(SPACE, OLD[0])
    assert pages(shared) == 15 and read(other, OLD[0]) is None


def test_what_fails_in_pages_that_were_there_leaves_nothing(shared: Path) -> None:
    pool = full_pool(shared)

    def full(place: PieceBytes) -> None:
        raise OSError(28, "no space")

    assert not pool.put(SPACE, NEW[0], KIB, full)
    assert (exact(pool.use()).pieces, pages(shared)) == (15, 15)
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
    pool = HostPool(tmp_path, BOUND)
    assert exact(pool.use()).pieces >= 12, "who was slower than another one may have found no room"
    assert all(put(pool, piece) for piece in pieces(16, 9)) and exact(pool.use()).pieces == 16


def test_a_pool_goes_on_where_it_has_more_pieces_than_slots(shared: Path) -> None:
    pool = HostPool(shared, 1 << 20)
    for piece in pieces(4200, 5):
        assert pool.put(SPACE, piece, 1, lambda place: None)
    assert pool.use().pieces == 4096 == pages(shared)


def test_extents_of_all_sizes_find_gaps_for_ever(shared: Path) -> None:
    """Sparse addresses are gone through several times."""
    pool, draw = HostPool(shared, 4096 * KIB), np.random.default_rng(1)
    for round_ in range(40):
        for piece in pieces(10, 100 + round_):
            nbytes = int(draw.integers(1, 2000)) * KIB
            assert pool.put(SPACE, piece, nbytes, lambda place: None)
    use = pool.use()
    assert use.booked_bytes == use.file_bytes <= 4096 * KIB and pages(shared) * 4 <= 4096 + 4 * use.pieces


def test_a_child_has_what_it_writes_for_itself(shared: Path) -> None:
    """Who forked it dies and is seen to be dead; and the other way round."""
    pool = HostPool(shared, BOUND)
    claim = pool.claim(KIB, "parent")
    child = os.fork()
    if child == 0:
        kept = pool.claim(2 * KIB, "child")
        os._exit(0 if kept is not None and pool.claims() == {"parent": KIB, "child": 2 * KIB} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert claim is not None
    assert pool.claims() == {"parent": KIB}
    claim.close()
    assert pool.use().booked_bytes == 0 and pages(shared) == 0
