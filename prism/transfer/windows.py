"""Windows: named ranges of memory that machines send each other, whatever is in them.

::

    | leaf 0 | leaf 1 | leaf 2 |  ...  | leaf n-1 |     equal leaves, the last may be shorter
      there    there    absent           absent         what is there: one byte per leaf, 1 or another value

A window may still be arriving: each leaf is verified against a checksum that its owner knows and may be used, and
passed on, from that moment. What the bytes mean (an engine's weights, a request's keys and values) and where the
checksums come from is the owner's business; a window on a device puts its bytes through memory of the host
(:meth:`Landing.view`).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final, Protocol

THERE: Final = 1
"""The value of a leaf that is held, in a map of what is there; any other means that it is not."""


@dataclass(frozen=True, slots=True)
class LeafCut:
    """``nbytes`` cut into leaves of ``leaf_bytes``."""

    nbytes: int
    leaf_bytes: int

    @property
    def leaves(self) -> int:
        return -(-self.nbytes // self.leaf_bytes)

    def bounds(self, leaf: int) -> tuple[int, int]:
        """First byte and end of a leaf."""
        start = leaf * self.leaf_bytes
        return start, min(start + self.leaf_bytes, self.nbytes)

    def holding(self, first: int, end: int) -> range:
        """The leaves that hold bytes ``first .. end``."""
        return range(first // self.leaf_bytes, -(-end // self.leaf_bytes)) if end > first else range(0)


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Memory of this process, as one-sided networks register it."""

    address: int
    nbytes: int


class PinnedMemory(Protocol):
    """A window's memory, kept where it is until :meth:`close`."""

    @property
    def span(self) -> MemorySpan: ...
    def close(self) -> None: ...


class OfferedWindow(Protocol):
    """What a machine sends from. Safe to use from several threads."""

    @property
    def cut(self) -> LeafCut: ...
    @property
    def complete(self) -> bool: ...

    def has(self, leaves: range) -> bool:
        """Whether all of ``leaves`` are there."""
        ...

    def arrival_map(self) -> bytes:
        """What is there now, one byte per leaf (:data:`THERE`)."""
        ...

    def send(self, sock: socket.socket, first: int, end: int) -> None:
        """Sends bytes ``first .. end``, which must be there. Raises ``TimeoutError`` after the socket's timeout without
        a byte taken, ``OSError``."""
        ...

    def pin(self) -> PinnedMemory:
        """The memory, for one-sided reads by others. Raises :class:`~prism.transfer.errors.SourceLost` when it is
        gone."""
        ...

    def close(self) -> None:
        """Nobody sends from it any more."""
        ...


class Landing(Protocol):
    """What a machine receives into: the writable side of a window."""

    @property
    def cut(self) -> LeafCut: ...
    @property
    def span(self) -> MemorySpan: ...

    def has(self, leaves: range) -> bool:
        """Whether all of ``leaves`` are there."""
        ...

    def view(self, first: int, end: int) -> memoryview:
        """Where bytes ``first .. end`` are to be written; :meth:`accept` follows for each leaf that is whole."""
        ...

    def populate(self, first: int, nbytes: int) -> None:
        """These bytes are about to come: their memory may be made ready."""
        ...

    def accept(self, leaf: int) -> bool:
        """Verifies a leaf that is in place and marks it as there. False, and it counts as absent, if it is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class Description:
    """What a receiver has to know to make a window like the sender's: ``raw`` is understood by the windows' owners on
    both sides, ``leaves`` is its number of leaves."""

    raw: bytes
    leaves: int


class WindowSource(Protocol):
    """The windows of a machine by name, as its server offers them. Safe to use from several threads."""

    def describe(self, name: str) -> Description | None:
        """The window's description, None if it is not here; no data is touched."""
        ...

    def open(self, name: str) -> OfferedWindow | None:
        """The window, kept in place until its ``close``; None if it is not here. Raises :class:`PrismError`."""
        ...


class WindowSources:
    """The windows of several owners, each of which knows its own names: a :class:`WindowSource`."""

    def __init__(self, *sources: WindowSource) -> None:
        self._sources = sources

    def describe(self, name: str) -> Description | None:
        return next((found for s in self._sources if (found := s.describe(name)) is not None), None)

    def open(self, name: str) -> OfferedWindow | None:
        return next((found for s in self._sources if (found := s.open(name)) is not None), None)
