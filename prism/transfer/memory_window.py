"""Windows over memory of this process, for bytes that live as long as what they belong to: a request's keys and values.

The sender knows the bytes, and their checksums go to the receiver in the window's description. Memory of a device has
host memory as its window: the sender copies into it first, the receiver hands each leaf on as soon as it is verified
(``on_leaf``)::

    device --copy--> MemoryWindow ======> MemoryWindow --on_leaf--> device
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import xxhash

from prism.transfer.errors import PeerError
from prism.transfer.windows import THERE, Description, LeafCut, MemorySpan

OnLeaf = Callable[[int, memoryview], None]
"""Called in the receiving thread with the first byte's number and the bytes of a leaf that was verified."""


class _Shape(msgspec.Struct, frozen=True, array_like=True):
    """The raw description: what a receiver makes its side of the window from."""

    nbytes: int
    leaf_bytes: int
    sums: list[int]
    """xxh3-64 of each leaf."""


class MemoryWindow:
    """An :class:`~prism.transfer.windows.OfferedWindow` and a :class:`~prism.transfer.windows.Landing`: what arrives is
    passed on. Made by :meth:`over` at the sender and by :meth:`described` at a receiver."""

    def __init__(self, memory: memoryview, shape: _Shape, there: bool, on_leaf: OnLeaf | None) -> None:
        self.cut = LeafCut(shape.nbytes, shape.leaf_bytes)
        self._shape, self._on_leaf = shape, on_leaf
        self.data = memory
        array = np.frombuffer(memory, dtype=np.uint8)
        self.span = MemorySpan(int(array.ctypes.data), memory.nbytes)
        self._map = bytearray([THERE if there else 0]) * self.cut.leaves

    @classmethod
    def over(cls, memory: memoryview, leaf_bytes: int) -> MemoryWindow:
        """All of ``memory`` (of bytes, contiguous, writable), which must not change while it is offered."""
        cut = LeafCut(memory.nbytes, leaf_bytes)
        sums = [xxhash.xxh3_64_intdigest(memory[slice(*cut.bounds(leaf))]) for leaf in range(cut.leaves)]
        return cls(memory, _Shape(memory.nbytes, leaf_bytes, sums), True, None)

    @classmethod
    def described(cls, raw: bytes, on_leaf: OnLeaf | None = None) -> MemoryWindow:
        """Fresh memory for the window with this description. Raises :class:`~prism.transfer.errors.PeerError` for one
        that is none."""
        try:
            shape = msgspec.msgpack.decode(raw, type=_Shape)
        except msgspec.MsgspecError as error:
            raise PeerError("peer", f"sent what describes no window: {error}") from error
        if shape.leaf_bytes < 1 or len(shape.sums) != LeafCut(shape.nbytes, shape.leaf_bytes).leaves:
            raise PeerError("peer", f"describes {shape.nbytes} bytes in {len(shape.sums)} leaves of {shape.leaf_bytes}")
        return cls(memoryview(bytearray(shape.nbytes)), shape, False, on_leaf)

    @property
    def description(self) -> Description:
        return Description(msgspec.msgpack.encode(self._shape), self.cut.leaves)

    @property
    def complete(self) -> bool:
        return self.has(range(self.cut.leaves))

    def has(self, leaves: range) -> bool:
        return self._map.count(THERE, leaves.start, leaves.stop) == len(leaves)

    def arrival_map(self) -> bytes:
        return bytes(self._map)

    def view(self, first: int, end: int) -> memoryview:
        return self.data[first:end]

    def populate(self, first: int, nbytes: int) -> None:
        """Nothing: the memory is there."""

    def accept(self, leaf: int) -> bool:
        first, end = self.cut.bounds(leaf)
        if xxhash.xxh3_64_intdigest(self.data[first:end]) != self._shape.sums[leaf]:
            return False
        if self._on_leaf is not None:
            self._on_leaf(first, self.data[first:end])
        self._map[leaf] = THERE
        return True

    def send(self, sock: socket.socket, first: int, end: int) -> None:
        sock.sendall(self.data[first:end])

    def pin(self) -> MemoryWindow:
        return self

    def close(self) -> None:
        """Nothing: the memory goes with its last user."""


class MemoryWindows:
    """Windows by name, a :class:`~prism.transfer.windows.WindowSource`; thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._by_name: dict[str, MemoryWindow] = {}

    def offer(self, name: str, window: MemoryWindow) -> None:
        """Others may receive it from now on, until :meth:`withdraw`."""
        with self._guard:
            self._by_name[name] = window

    def withdraw(self, name: str) -> None:
        """Whoever receives it already gets the rest."""
        with self._guard:
            self._by_name.pop(name, None)

    def describe(self, name: str) -> Description | None:
        window = self.open(name)
        return None if window is None else window.description

    def open(self, name: str) -> MemoryWindow | None:
        with self._guard:
            return self._by_name.get(name)
