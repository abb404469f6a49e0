"""How fast does a request's KV leave an engine's memory and come back, against a plain copy of as many bytes?

    python -m benchmarks.kv.copy_rate [--rounds 15] [--mib 192]

A pool with tokens of 128 KiB (Llama-8B) and one of 4 KiB hold one long sequence, its slots as the pool hands them out
and again in no order. Piece by piece it is packed into memory (*out*) and put back into other slots (*in*), and the
same with checksums (*summed*); then through the machine's pool: *out* into one that is full, which drops as much, *in*
by who wrote or read the memory before, *out, new pages* into one that is empty, *in, first* by a process that reads
it for the first time. *Limits*: what the kernel takes for the last two alone, a plain write into new files and a
plain copy out of files that are mapped for it. *Row by row*: the same rows in the same order by the C library, one copy
a row (numpy's take), with neither sum nor pool. It is a yardstick, no bound: copies past the caches may be faster.
Beside each stands a plain copy of pieces of the same size, in the same round.
Goal: out and in at least 85% of the plain copy for pieces of 2 MiB and more.

The second table says where the time of a piece goes, in us: copy, checksum, and all else that the pool does for it.

Last result: docs/results/kv.md.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prism import memory
from prism.kv.host_pool import HostPool
from prism.kv.naming import PieceName
from prism.kv.piece_file import PieceStaging, piece_bytes, read_piece, write_piece
from prism.kv.pool_directory import end_pool
from prism.memory.rows import HostPoolRows, Packed, RowNumbers, packed_bytes

MIB = 1 << 20
TOKENS = {"128 KiB tokens": (32, 8, 128, 2), "4 KiB tokens": (4, 2, 64, 4)}
"""Layers, heads, dimension and bytes per element."""
PIECES_MIB = (0.25, 2, 8)
SPACE = "0" * 32
WARM_UP = 4
"""Rounds until the pool is full and all its memory is mapped."""


class CopyBed:
    """A pool full of one sequence, and memory of the same size beside it."""

    def __init__(self, folder: Path, layout: memory.KvLayout, nbytes: int, shuffled: bool) -> None:
        device = memory.open_device("host:0", 3 * nbytes, account_dir=folder)
        pool = device.register("bench").arena(4 * nbytes).divide(layout, 2 * nbytes // layout.cell_bytes)
        made = np.random.default_rng(1)
        slots = pool.alloc(2 * nbytes // layout.cell_bytes // 2 * 2 - 64)
        half = len(slots) // 2
        if shuffled:
            made.shuffle(slots)
        self.pool, self.rows = pool, HostPoolRows(pool)
        self.there, self.here = slots[:half].copy(), slots[half:].copy()
        self.width = layout.cell_bytes
        (column,) = self.rows.columns
        assert (column.start, column.stride, column.width) == (0, self.width, self.width)
        memory_of_rows = (ctypes.c_uint8 * (pool.rows * self.width)).from_address(pool.address)
        self.plain_rows: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory_of_rows), dtype=np.uint8).reshape(
            -1, self.width
        )
        self.source: Packed = made.integers(0, 256, half * self.width, dtype=np.uint8)
        self.packed = packed_bytes(len(self.source))  # as what leaves an engine is packed
        self.packed.fill(0)
        self.rows.scatter(0, self.there, self.source)
        self.rows.scatter(0, self.here, self.source)

    def each(self, piece_tokens: int, run: Callable[[int, int], None]) -> float:
        """Bytes per second of ``run(first, end)`` over all pieces."""
        start_s = time.perf_counter()
        count = len(self.there) // piece_tokens
        for i in range(count):
            run(i * piece_tokens, (i + 1) * piece_tokens)
        return count * piece_tokens * self.width / (time.perf_counter() - start_s)

    def part(self, of: Packed, first: int, end: int) -> Packed:
        return of[first * self.width : end * self.width]


WAYS = (
    "out", "in", "out, summed", "in, summed", "pool: out", "pool: in",
    "pool: out, new pages", "limit", "pool: in, first", "limit of that", "row by row",
)  # fmt: skip


class PlainFiles:
    """The kernel's part alone: files of memory that are written for the first time, and mapped for the first time."""

    def __init__(self, bed: CopyBed, folder: Path) -> None:
        self._bed, self._folder = bed, folder
        folder.mkdir()

    def write(self, first: int, end: int) -> None:
        with (self._folder / str(first)).open("wb", buffering=0) as file:
            file.write(self._bed.part(self._bed.source, first, end).data)

    def read(self, first: int, end: int) -> None:
        with (self._folder / str(first)).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        np.copyto(self._bed.part(self._bed.packed, first, end), np.frombuffer(mapped, dtype=np.uint8))

    def drop(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()


class PoolWays:
    """Pieces of one size on their way through the machine's pool."""

    def __init__(self, bed: CopyBed, piece_tokens: int, folder: Path) -> None:
        self._bed, self._tokens, self._folder = bed, piece_tokens, folder
        self._nbytes = piece_bytes([column.width for column in bed.rows.columns], piece_tokens)
        self._bound = 2 * (len(bed.there) // piece_tokens) * self._nbytes
        self._staging, self._numbers = PieceStaging(), itertools.count()
        self._full = HostPool(folder / "full", self._bound)
        self.names: dict[int, PieceName] = {}
        """Of what was written last, by their first token."""

    def writes(self) -> Callable[[int, int], None]:
        """Into the pool that is full, but for the first time."""
        return lambda first, end: self._write(self._full, first, end)

    def writes_new(self) -> Callable[[int, int], None]:
        pool = HostPool(self._folder / f"new-{next(self._numbers)}", self._bound)
        return lambda first, end: self._write(pool, first, end)

    def _write(self, pool: HostPool, first: int, end: int) -> None:
        name = self.names[first] = PieceName(f"{next(self._numbers):032x}", 0, self._tokens)
        rows = self._bed.there[first:end]
        stored = pool.put(
            SPACE, name, self._nbytes, lambda place: write_piece(place, self._bed.rows, rows, self._staging)
        )
        assert stored

    def reads(self) -> Callable[[int, int], None]:
        return lambda first, end: self._read(self._full, first, end)

    def reads_first(self) -> Callable[[int, int], None]:
        pool = HostPool(self._folder / "full", self._bound)
        return lambda first, end: self._read(pool, first, end)

    def _read(self, pool: HostPool, first: int, end: int) -> None:
        with pool.opened(SPACE, self.names[first]) as place:
            assert place is not None
            read_piece(place, self._bed.rows, self._bed.here[first:end], 0)

    def drop_new(self) -> None:
        for folder in self._folder.glob("new-*"):
            end_pool(folder)

    def drop_full(self) -> None:
        end_pool(self._folder / "full")


def rates(bed: CopyBed, piece_tokens: int, pool: PoolWays, files: PlainFiles) -> dict[str, float]:
    """One round of all ways, in turns."""

    def plain(first: int, end: int) -> None:
        np.copyto(bed.part(bed.packed, first, end), bed.part(bed.source, first, end))

    def out(first: int, end: int) -> None:
        bed.rows.gather(0, bed.there[first:end], bed.part(bed.packed, first, end))

    def row_by_row(first: int, end: int) -> None:
        into = bed.part(bed.packed, first, end).reshape(-1, bed.width)
        np.take(bed.plain_rows, bed.there[first:end], axis=0, out=into, mode="clip")

    def back(first: int, end: int) -> None:
        bed.rows.scatter(0, bed.here[first:end], bed.part(bed.packed, first, end))

    def out_summed(first: int, end: int) -> None:
        bed.rows.gather_summed(0, bed.there[first:end], bed.part(bed.packed, first, end))

    def back_summed(first: int, end: int) -> None:
        bed.rows.scatter_summed(0, bed.here[first:end], bed.part(bed.packed, first, end))

    found = {
        "plain copy": bed.each(piece_tokens, plain),
        "out": bed.each(piece_tokens, out),
        "in": bed.each(piece_tokens, back),
        "out, summed": bed.each(piece_tokens, out_summed),
        "in, summed": bed.each(piece_tokens, back_summed),
        "pool: out, new pages": bed.each(piece_tokens, pool.writes_new()),
        "pool: out": bed.each(piece_tokens, pool.writes()),
        "pool: in": bed.each(piece_tokens, pool.reads()),
        "limit": bed.each(piece_tokens, files.write),
        "pool: in, first": bed.each(piece_tokens, pool.reads_first()),
        "limit of that": bed.each(piece_tokens, files.read),
    }
    check(bed, bed.here[: len(bed.there) // piece_tokens * piece_tokens])
    bed.packed.fill(0)
    found["row by row"] = bed.each(piece_tokens, row_by_row)
    moved = len(bed.there) // piece_tokens * piece_tokens * bed.width
    assert (bed.packed[:moved] == bed.source[:moved]).all()
    pool.drop_new()
    files.drop()
    return found


def spent(rounds: list[dict[str, float]], nbytes: int) -> str:
    """A row of the second table: us of a piece."""
    us = {way: 1e6 * nbytes / statistics.median(r[way] for r in rounds) for way in ("plain copy", *WAYS)}
    parts = [us["plain copy"]]
    for way in ("out", "in"):
        copy, summed, all_of_it = us[way], us[f"{way}, summed"], us[f"pool: {way}"]
        parts += [copy, summed - copy, all_of_it - summed]
    return " | ".join(f"{part:.0f}" for part in parts)


def check(bed: CopyBed, rows: RowNumbers) -> None:
    """What was moved is what was there."""
    found: npt.NDArray[np.uint8] = np.empty(len(rows) * bed.width, dtype=np.uint8)
    bed.rows.gather(0, rows, found)
    assert (found == bed.source[: len(found)]).all()


def main() -> None:
    parser = argparse.ArgumentParser(description="Rate of moving KV against a plain copy.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=192)
    options = parser.parse_args()
    print(f"| tokens | piece | plain copy, GB/s | {' | '.join(WAYS)} |")
    print("|---|---|---|" + "---|" * len(WAYS))
    where: list[str] = []
    for (name, (layers, heads, dim, size)), shuffled in itertools.product(TOKENS.items(), (False, True)):
        layout = memory.KvLayout(layers=layers, kv_heads=heads, head_dim=dim, dtype_bytes=size)
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="prism-bench-") as made:
            bed = CopyBed(Path(made), layout, options.mib * MIB, shuffled)
            for piece_mib in PIECES_MIB:
                tokens = max(1, int(piece_mib * MIB) // layout.cell_bytes)
                pool = PoolWays(bed, tokens, Path(made) / f"pool-{piece_mib}")
                files = PlainFiles(bed, Path(made) / f"plain-{piece_mib}")
                rounds = [rates(bed, tokens, pool, files) for _ in range(options.rounds + WARM_UP)][WARM_UP:]
                pool.drop_full()
                plain = statistics.median(r["plain copy"] for r in rounds)
                shares = [statistics.median(r[way] / r["plain copy"] for r in rounds) for way in WAYS]
                shown = " | ".join(f"{100 * share:.0f}%" for share in shares)
                row = f"{name}, {'in no order' if shuffled else 'as handed out'} | {piece_mib} MiB"
                print(f"| {row} | {plain / 1e9:.2f} | {shown} |", flush=True)
                where.append(f"| {row} | {spent(rounds, tokens * layout.cell_bytes)} |")
    print("\n| tokens | piece | plain copy, us | out | sum | pool | in | sum | pool |")
    print("|---|---|---|" + "---|" * 6, *where, sep="\n")


if __name__ == "__main__":
    main()
