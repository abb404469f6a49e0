"""The memory of a pool of pieces that has grown: made ahead in the kernel's huge pages, given back piece by piece."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from prism.memory._kvcached import PieceIndex, rehearse_deaths
from tests.memory.huge import HUGE, huge_bytes, needs_them

PIECE = HUGE + 4096
BOUND = 96 << 20
AHEAD = 16 << 20


def opened(directory: Path) -> PieceIndex:
    return PieceIndex(str(directory), 4096, 4 * BOUND)


def name_of(number: int) -> str:
    return f"{7:032x}/{number:06x}-{number:032x}"


def stored(index: PieceIndex, number: int) -> bool:
    found = index.begin(name_of(number), PIECE, BOUND)
    if found is None:
        return False
    slot, offset, nbytes = found
    np.from_dlpack(index.memory())[offset : offset + nbytes] = number
    return index.commit(slot, float(number))


def holds(index: PieceIndex, number: int) -> bool:
    found = index.pin(name_of(number))
    assert found is not None
    whole = bool((np.from_dlpack(index.memory())[found[1] : found[1] + PIECE] == number).all())
    index.unpin(found[0])
    return whole


def taken_bytes(directory: Path) -> int:
    return (directory / "pieces").stat().st_blocks * 512


def mapped_huge(index: PieceIndex) -> int:
    memory = np.from_dlpack(index.memory())
    start = memory.__array_interface__["data"][0]
    return huge_bytes(start, start + memory.nbytes)


@needs_them
def test_a_pool_that_grows_lies_in_huge_pages_whoever_has_it_mapped(shared: Path) -> None:
    index = opened(shared)
    for number in range(32):
        assert stored(index, number)
    other = opened(shared)
    assert all(holds(other, number) for number in range(32))
    # All but what was there before the pool was large, and the borders.
    for who in (index, other):
        assert mapped_huge(who) >= 32 * PIECE - AHEAD - 2 * HUGE


def test_what_is_made_ahead_is_bounded_and_a_pool_that_stays_small_has_none(shared: Path) -> None:
    index, booked = opened(shared), 0
    for number in range(BOUND // PIECE):
        assert stored(index, number)
        booked += PIECE
        ahead = taken_bytes(shared) - booked
        assert 0 <= ahead <= (0 if booked < AHEAD else AHEAD + HUGE)
        assert taken_bytes(shared) <= BOUND + HUGE
    assert not stored(index, 1000)


def test_pieces_that_share_huge_pages_are_given_back_one_by_one(shared: Path) -> None:
    index = opened(shared)
    for number in range(32):
        assert stored(index, number)
    before = taken_bytes(shared)
    for number in range(0, 32, 2):
        assert index.drop(name_of(number)) == PIECE
    assert taken_bytes(shared) == before - 16 * PIECE
    assert all(holds(index, number) for number in range(1, 32, 2))
    index.end()
    assert taken_bytes(shared) == 0


@pytest.mark.parametrize("store_number", range(1, 24))
def test_who_dies_while_it_makes_memory_ahead_takes_nothing_with_it(shared: Path, store_number: int) -> None:
    index = opened(shared)
    count = AHEAD // PIECE  # the next one is the first for which memory is made ahead
    for number in range(count):
        assert stored(index, number)
    child = os.fork()
    if child == 0:
        dying = opened(shared)
        rehearse_deaths(store_number)
        stored(dying, count)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    index.reap()
    for number in range(count + 1, count + 12):
        assert stored(index, number)
    assert all(holds(index, number) for number in range(count))
    assert index.books()[0] <= taken_bytes(shared) <= index.books()[0] + AHEAD + HUGE
    index.end()
    assert taken_bytes(shared) == 0
