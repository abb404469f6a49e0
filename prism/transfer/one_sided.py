"""How the bytes of a granted transfer get across: the narrow interface that a fast network plugs into.

Questions, grants and acknowledgements always go over TCP (:mod:`prism.transfer.frames`). The bytes go over the same
connection, or a :class:`OneSidedNetwork` at the puller reads them out of the server's memory (one-sided), while its
counterpart at the server only keeps the network library going.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prism.transfer.windows import MemorySpan


class OneSidedNetwork(Protocol):
    """One-sided reads of windows' memory. One object per process serves and pulls; thread-safe."""

    name: str
    """As in :class:`~prism.transfer.frames.Welcome`."""

    def offer(self, memory: MemorySpan, offset: int) -> bytes:
        """Makes ``memory`` readable for others; what a puller needs to know to read it from byte ``offset`` on."""
        ...

    def make_progress(self) -> None:
        """Keeps transfers out of this process's memory going; called often while one is granted."""
        ...

    def read(
        self, descriptor: bytes, memory: MemorySpan, offset: int, nbytes: int, raise_if_dead: Callable[[], None]
    ) -> None:
        """Reads ``nbytes`` that the server offered with ``descriptor`` into ``memory`` at ``offset``. Calls
        ``raise_if_dead`` all the while, which raises when the transfer is to be given up. Raises ``EOFError`` when the
        server is gone."""
        ...

    def forget(self, memory: MemorySpan) -> None:
        """``memory`` is about to be unmapped."""
        ...
