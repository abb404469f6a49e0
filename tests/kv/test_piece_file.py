"""A piece comes back as it was stored, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prism.kv.piece_file import (
    HEADER_BYTES,
    LEAF_BYTES,
    BadPiece,
    FileBytes,
    MemoryBytes,
    PieceStaging,
    piece_bytes,
    piece_leaves,
    read_piece,
    write_piece,
)
from tests.kv.rows import ArrayRows

WIDTHS = ((48,), (7, 9), (LEAF_BYTES // 3,), (LEAF_BYTES + 5, 16))
STAGING = PieceStaging()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    made = os.open(tmp_path / "piece", os.O_RDWR | os.O_CREAT)
    yield made
    os.close(made)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("skip", [0, 1, 9])
def test_rows_come_back_in_others(fd: int, widths: tuple[int, ...], skip: int) -> None:
    source, target = ArrayRows(widths, 30, 1), ArrayRows(widths, 30, 2)
    there, here = np.arange(20, 10, -1), np.arange(5, 15)[skip:]
    untouched = target.at(np.setdiff1d(np.arange(30), here))
    write_piece(FileBytes(fd), source, there, STAGING)
    assert os.fstat(fd).st_size == piece_bytes(widths, 10)
    read_piece(FileBytes(fd), target, here, skip)
    assert target.at(here) == source.at(there[skip:])
    assert target.at(np.setdiff1d(np.arange(30), here)) == untouched


def test_leaves_lie_one_behind_the_other_and_hold_whole_rows() -> None:
    for widths in WIDTHS:
        offset = HEADER_BYTES
        for leaf in piece_leaves(widths, 10):
            assert leaf.offset == offset and leaf.nbytes == (leaf.end - leaf.first) * widths[leaf.column]
            assert leaf.nbytes <= LEAF_BYTES or leaf.end - leaf.first == 1
            offset += leaf.nbytes
        assert offset == piece_bytes(widths, 10)


@pytest.mark.parametrize("place", [0, 9, 17, 24, HEADER_BYTES, -1])
def test_a_changed_byte_is_found(fd: int, place: int) -> None:
    source, target = ArrayRows((48, 16), 30, 1), ArrayRows((48, 16), 30, 2)
    rows = np.arange(10)
    write_piece(FileBytes(fd), source, rows, STAGING)
    at = place % os.fstat(fd).st_size
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 64]), at)
    with pytest.raises(BadPiece):
        read_piece(FileBytes(fd), target, rows, 0)


def test_other_tokens_another_layout_or_a_lost_end_are_found(fd: int) -> None:
    source, rows = ArrayRows((48,), 30, 1), np.arange(10)
    write_piece(FileBytes(fd), source, rows, STAGING)
    with pytest.raises(BadPiece, match="11 tokens"):
        read_piece(FileBytes(fd), source, np.arange(11), 0)
    with pytest.raises(BadPiece):
        read_piece(FileBytes(fd), ArrayRows((24, 24), 30), rows, 0)
    os.ftruncate(fd, piece_bytes((48,), 10) - 1)
    with pytest.raises(BadPiece):
        read_piece(FileBytes(fd), source, rows, 0)
    os.ftruncate(fd, 5)
    with pytest.raises(BadPiece):
        read_piece(FileBytes(fd), source, rows, 0)


def test_memory_is_a_place_too() -> None:
    source, target, rows = ArrayRows((48, 16), 30, 1), ArrayRows((48, 16), 30, 2), np.arange(10)
    place = MemoryBytes(np.zeros(piece_bytes((48, 16), 10), dtype=np.uint8))
    write_piece(place, source, rows, STAGING)
    read_piece(place, target, rows, 0)
    assert target.at(rows) == source.at(rows)
    place.memory[-1] ^= 1
    with pytest.raises(BadPiece):
        read_piece(place, target, rows, 0)
    with pytest.raises(BadPiece):
        read_piece(MemoryBytes(place.memory[:-1]), target, rows, 0)
