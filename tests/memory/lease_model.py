"""A lease by brute force: every block a value in a list, every question answered by trying it out; and the C++ books
(``csrc/kvcached/src/lease_books.cpp``) through a C face."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNLIMITED = 2**63 - 1
ABSENT, MAPPING, READY, UNMAPPING = "absent", "mapping", "ready", "unmapping"
State = str | int
"""Of a block: a number is the slots in use of a used one, without the padding slot of block 0."""


class BlockCounts(ctypes.Structure):
    """``kvcached::BlockCounts``."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("used_slots", "used_blocks", "partial_free", "ready", "mapped", "unmapping")
    ]


def build_books(directory: Path) -> ctypes.CDLL:
    """Compile the books and their C face; skips where there is no C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the books with")
    core, out = ROOT / "csrc" / "kvcached", directory / "libleasebooks.so"
    sources = [str(Path(__file__).with_name("lease_books.cpp")), str(core / "src" / "lease_books.cpp")]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{core / 'include'}"]
    subprocess.run([compiler, *flags, "-o", str(out), *sources], check=True)
    library = ctypes.CDLL(str(out))
    library.books_new.restype = ctypes.c_void_p
    library.books_problem.restype = ctypes.c_char_p
    for name in ("held", "target", "available", "room", "needed", "unneeded", "surplus", "returnable", "take_back"):
        getattr(library, f"books_{name}").restype = ctypes.c_int64
    return library


class Books:
    """One ``LeaseBooks``. Block counts go in with each call, as in C++."""

    def __init__(self, library: ctypes.CDLL, model: Model) -> None:
        self._library, self._model = library, model
        sizes = (len(model.blocks), model.block_slots, model.max_slots, model.held)
        self._books = ctypes.c_void_p(library.books_new(*map(ctypes.c_int64, sizes), int(model.elastic)))

    def ask(self, question: str, *numbers: int) -> int:
        """The answer for the blocks as they are."""
        counts = ctypes.byref(self._model.counts())
        return int(getattr(self._library, f"books_{question}")(self._books, counts, *map(ctypes.c_int64, numbers)))

    def tell(self, change: str, *numbers: int) -> None:
        getattr(self._library, f"books_{change}")(self._books, *map(ctypes.c_int64, numbers))

    def follow_use(self, ready: int) -> None:
        counts = ctypes.byref(self._model.counts())
        self._library.books_follow_use(self._books, counts, ctypes.c_int64(ready))

    def state(self) -> tuple[int, int]:
        """Held, target."""
        return int(self._library.books_held(self._books)), int(self._library.books_target(self._books))

    def problem(self) -> bytes | None:
        found: bytes | None = self._library.books_problem(self._books, ctypes.byref(self._model.counts()))
        return found

    def delete(self) -> None:
        self._library.books_delete(self._books)


@dataclass
class Model:
    """What a pool knows, without arithmetic."""

    block_slots: int
    max_slots: int
    held: int
    elastic: bool
    blocks: list[State]
    target: int = 0
    ensured: int = 0
    refilling: int = 0
    promised: int = field(default=0)

    def capacity(self, block: int) -> int:
        return self.block_slots - (block == 0)

    def where(self, *states: State) -> list[int]:
        return [b for b, state in enumerate(self.blocks) if state in states]

    def used(self) -> list[int]:
        return [b for b, state in enumerate(self.blocks) if isinstance(state, int)]

    def used_slots(self) -> int:
        return sum(state for state in self.blocks if isinstance(state, int))

    def free_in(self, block: int) -> int:
        state = self.blocks[block]
        assert isinstance(state, int)
        return self.capacity(block) - state

    def mapped(self) -> int:
        return len(self.blocks) - len(self.where(ABSENT))

    def counts(self) -> BlockCounts:
        free = sum(self.free_in(b) for b in self.used())
        ready, unmapping = len(self.where(READY)), len(self.where(UNMAPPING))
        return BlockCounts(self.used_slots(), len(self.used()), free, ready, self.mapped(), unmapping)

    # ---- questions, answered by trying ----

    def slots_under(self, target: int) -> int:
        """Handed out one by one, from used blocks first, then from new ones, until ``target`` blocks are in use."""
        free, used, got = sum(self.free_in(b) for b in self.used()), len(self.used()), 0
        while free or used < target:
            if not free:
                free, used = self.block_slots, used + 1
            free, got = free - 1, got + 1
        return got

    def room(self) -> int:
        return self.max_slots - self.used_slots() - self.promised

    def available(self) -> int:
        if len(self.used()) > self.target:
            return 0
        left = self.max_slots - self.used_slots()
        return max(0, min(self.slots_under(min(self.target, len(self.blocks))), left) - self.promised)

    def needed(self, more: int) -> int:
        target = len(self.used())
        while self.slots_under(target) < more + self.promised:
            target += 1
        return target

    def unneeded(self, keep: int) -> int:
        def enough(target: int) -> bool:
            return target >= max(1, len(self.used())) and self.slots_under(target) >= keep + self.promised

        return max((k for k in range(self.target) if enough(self.target - k)), default=0)

    def surplus(self, high: int) -> int:
        ready, staying, gone = len(self.where(READY)), self.mapped() - len(self.where(UNMAPPING)), 0
        while ready and (ready > high or staying > self.target):
            ready, staying, gone = ready - 1, staying - 1, gone + 1
        return gone

    def committed(self) -> int:
        """Blocks that work under way may come to, each promised slot behind the others in blocks of their own."""
        promised = 0
        while promised * self.block_slots < self.promised:
            promised += 1
        return len(self.used()) + promised + self.refilling

    def returnable(self) -> int:
        gone = 0
        while self.held - gone > max(self.target, self.mapped(), self.committed()):
            gone += 1
        return gone

    def followed(self, keep_ready: int) -> int:
        """The least target that an elastic pool may have now."""
        if not self.elastic:
            return self.target
        wanted = max(self.committed() + min(len(self.where(READY)), keep_ready), self.ensured, 1)
        return wanted if wanted < self.target else self.target
