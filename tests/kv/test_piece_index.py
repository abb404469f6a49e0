"""The index of a pool against a dictionary, whoever dies at which store, and who may use whose."""

from __future__ import annotations

import itertools
import os
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.memory._kvcached import PieceIndex, rehearse_deaths

SLOTS, VIRTUAL, BOUND = 16, 40 * 4096, 12 * 4096
NAMES = [f"{n % 3:032x}/{n:06x}-{n + 7:032x}" for n in range(9)]


def opened(directory: Path | str) -> PieceIndex:
    return PieceIndex(str(directory), SLOTS, VIRTUAL)


@dataclass
class Known:
    """What is in a pool, by who keeps a dictionary."""

    pieces: dict[str, tuple[int, float]]
    """Bytes and time of use."""
    claims: list[tuple[bytes, int]]

    def of(self, index: PieceIndex) -> Known:
        return Known({name: (n, t) for name, n, t, _ in index.pieces()}, sorted(index.claims()))

    @property
    def booked_bytes(self) -> int:
        return sum(n for n, _ in self.pieces.values()) + sum(n for _, n in self.claims)


def filled(index: PieceIndex, slot: int, offset: int, nbytes: int, name: str) -> int:
    np.from_dlpack(index.memory())[offset : offset + nbytes] = NAMES.index(name) + 1
    return slot


def store(index: PieceIndex, name: str, nbytes: int, now_s: float) -> None:
    if not index.has(name) and (found := index.begin(name, nbytes, BOUND)) is not None:
        index.commit(filled(index, *found, name), now_s)


def replace(index: PieceIndex, old: str, name: str, now_s: float) -> None:
    """Writes ``name`` where ``old`` lies, whatever its time of use and size."""
    there = {found[0]: found for found in index.pieces()}
    if index.has(name) or old not in there:
        return
    _, nbytes, used_s, _ = there[old]
    if (found := index.take_over(old, used_s, name, nbytes)) is not None:
        index.commit(filled(index, *found, name), now_s)


Step = Callable[[PieceIndex, Known], None]


def step_of(what: str, a: int, b: int, now_s: float) -> Step:
    """Does it to both."""
    name, other, nbytes = NAMES[a], NAMES[b], 1 + (a * 7 + b) * 300

    def step(index: PieceIndex, known: Known) -> None:
        match what:
            case "store":
                store(index, name, nbytes, now_s)
                if name not in known.pieces and known.booked_bytes + nbytes <= BOUND:
                    known.pieces[name] = nbytes, now_s
            case "replace":
                replace(index, name, other, now_s)
                if name in known.pieces and other not in known.pieces:
                    known.pieces[other] = known.pieces.pop(name)[0], now_s
            case "drop":
                index.drop(name)
                known.pieces.pop(name, None)
            case "touch":
                index.touch(name, now_s)
                if name in known.pieces:
                    known.pieces[name] = known.pieces[name][0], now_s
            case "abandon":
                if (found := index.begin(name, nbytes, BOUND)) is not None:
                    index.abandon(found[0])
            case "claim":
                if (found := index.claim(name[:8], nbytes, BOUND)) is not None:
                    index.abandon(found[0])
            case "read":
                if (found := index.pin(name)) is not None:
                    index.drop(name)
                    index.unpin(found[0])
                known.pieces.pop(name, None)

    return step


STEPS = ("store", "store", "store", "replace", "drop", "touch", "abandon", "claim", "read")
steps = st.builds(step_of, st.sampled_from(STEPS), st.integers(0, 8), st.integers(0, 8), st.floats(1, 1e9))


def right(index: PieceIndex, directory: str) -> None:
    """Books, contents and memory agree."""
    booked, piece_bytes, count, writing = index.books()
    pieces, memory = index.pieces(), np.from_dlpack(index.memory())
    assert (booked, count, writing, index.claims()) == (piece_bytes, len(pieces), 0, [])
    assert piece_bytes == sum(nbytes for _, nbytes, _, _ in pieces) and booked <= BOUND
    lies: list[tuple[int, int]] = []
    for name, nbytes, _, position in pieces:
        assert position == NAMES.index(name)
        found = index.pin(name)
        assert found is not None and found[2] == nbytes
        lies.append((found[1], found[1] + nbytes))
        assert (memory[found[1] : found[1] + nbytes] == position + 1).all()
        index.unpin(found[0])
    lies.sort()
    assert all(end <= first for (_, end), (first, _) in itertools.pairwise(lies))
    pages = sum(-(-(end - first) // 4096) for first, end in lies)
    assert Path(directory, "pieces").stat().st_blocks * 512 == pages * 4096, "all other memory is given back"


@settings(deadline=None, max_examples=150)
@given(st.lists(steps, max_size=30))
def test_it_is_a_dictionary_that_several_have(story: list[Step]) -> None:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        indices, known = [opened(directory), opened(directory)], Known({}, [])
        for number, step in enumerate(story):
            step(indices[number % 2], known)
            assert known == known.of(indices[0])
            right(indices[0], directory)


def dies(directory: str, store_number: int, step: Step, known: Known) -> bool:
    """Does a step in a child that is killed before its n-th store. False: it ended before."""
    child = os.fork()
    if child == 0:
        index = opened(directory)
        rehearse_deaths(store_number)
        step(index, Known(dict(known.pieces), []))
        rehearse_deaths(0)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL
    return status != 0


@settings(deadline=None, max_examples=25)
@given(st.lists(steps, max_size=8), st.lists(steps, min_size=1, max_size=2), st.lists(steps, max_size=4))
def test_whoever_dies_at_any_store_leaves_what_was_or_what_will_be(
    before: list[Step], dying: list[Step], after: list[Step]
) -> None:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        index, known = opened(directory), Known({}, [])
        for step in before:
            step(index, known)
        for step in dying:
            number = 1
            while dies(directory, number, step, known):
                index.reap()
                here, was = known.of(index), known.pieces
                right(index, directory)
                done = Known(dict(was), [])
                with TemporaryDirectory(dir="/dev/shm") as elsewhere:
                    step(opened(elsewhere), done)  # what it would have come to
                gone = was.keys() - done.pieces.keys()
                assert not here.claims and here.pieces.items() <= was.items() | done.pieces.items()
                assert here.pieces.keys() >= (was.keys() - gone), "nothing else is lost"
                known = here
                number += 1
            known = known.of(index)
            right(index, directory)
        for step in after:
            step(index, known)
            assert known == known.of(index)
            right(index, directory)


def test_what_a_dead_one_was_doing_is_given_back_by_who_looks(shared: Path) -> None:
    index = opened(shared)
    store(index, NAMES[0], 5000, 1.0)
    child = os.fork()
    if child == 0:
        dying = opened(shared)
        assert dying.begin(NAMES[1], 3000, BOUND) and dying.claim("c", 3000, BOUND) and dying.pin(NAMES[0])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert index.take_over(NAMES[0], 1.0, NAMES[2], 5000) is None and not index.has(NAMES[0]), "it is taken to be read"
    assert (shared / "pieces").stat().st_blocks * 512 == (2 + 1 + 1) * 4096, "of the claim its label"
    assert index.books()[0] == 6000
    index.reap()
    assert index.books() == (0, 0, 0, 0) and (shared / "pieces").stat().st_blocks == 0


def test_one_that_is_read_by_as_many_as_there_are_is_not_there_for_more(tmp_path: Path) -> None:
    index = opened(tmp_path)
    store(index, NAMES[0], 100, 1.0)
    pins = [index.pin(NAMES[0]) for _ in range(31)]
    assert all(pins) and index.pin(NAMES[0]) is None and opened(tmp_path).pin(NAMES[0]) is not None
    for found in pins:
        assert found is not None
        index.unpin(found[0])
    assert index.pin(NAMES[0]) is not None


def test_an_index_that_has_ended_takes_nothing_in_and_gives_everything_back(shared: Path) -> None:
    index, other = opened(shared), opened(shared)
    store(index, NAMES[0], 5000, 1.0)
    store(index, NAMES[1], 5000, 1.0)
    reading, claimed = index.pin(NAMES[0]), index.claim("c", 100, BOUND)
    written = index.begin(NAMES[2], 100, BOUND)
    other.end()
    assert reading is not None and claimed is not None and written is not None
    assert not index.has(NAMES[0]) and index.begin(NAMES[3], 1, BOUND) is None and index.claim("d", 1, BOUND) is None
    assert (np.from_dlpack(index.memory())[reading[1] : reading[1] + 5000] == 1).all()
    index.unpin(reading[0])
    index.abandon(claimed[0])
    assert not index.commit(written[0], 2.0)
    assert index.books() == (0, 0, 0, 0) and (shared / "pieces").stat().st_blocks == 0


@pytest.mark.parametrize("magic, version", [(b"PRMKVIP!", 1), (None, 99)])
def test_another_version_is_refused_while_it_is_in_use_and_made_anew_when_nobody_does(
    shared: Path, magic: bytes | None, version: int
) -> None:
    index = opened(shared)
    store(index, NAMES[0], 5000, 1.0)
    with (shared / "index").open("r+b") as file:
        stamp = struct.unpack("<8sI", file.read(12))
        file.seek(0)
        file.write(struct.pack("<8sI", magic or stamp[0], version))
    with pytest.raises(OSError, match="another version"):
        opened(shared)
    assert index.has(NAMES[0])
    del index
    again = opened(shared)
    assert again.books() == (0, 0, 0, 0) and (shared / "pieces").stat().st_blocks == 0
    store(again, NAMES[0], 5000, 1.0)
    right(again, str(shared))


@pytest.mark.parametrize("name", ["", "0/0-0", "0" * 32 + "/000000-" + "g" * 32, "0" * 32 + "000000-" + "0" * 33])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name of a piece"):
        opened(tmp_path).has(name)


def test_more_owners_than_there_are_places_are_refused_and_dead_ones_make_way(tmp_path: Path) -> None:
    many = [opened(tmp_path) for _ in range(512)]
    with pytest.raises(OSError, match="too many"):
        opened(tmp_path)
    many[100].claim("c", 100, BOUND)
    del many[100]
    assert opened(tmp_path).books() == (0, 0, 0, 0)
