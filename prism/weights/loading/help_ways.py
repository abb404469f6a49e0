"""The loading side of loading over helpers: what another process stages in its device's memory is copied from there.

A helper may be slow, leave, die or hang at any time: what it has not brought is loaded over the target's own link
(:mod:`prism.weights.loading.chunks`).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from prism import memory
from prism.memory.errors import DeadDriver, DeviceMemoryError
from prism.weights.loading.chunks import Chunks, WayBooks
from prism.weights.loading.help_wire import (
    AskHelp,
    HelpWithdrawn,
    Packet,
    Ring,
    StageChunk,
    Staged,
    packet_socket,
    receive,
    send,
)

log = logging.getLogger(__name__)

_ANSWER_S: Final = 2.0
"""A helper that has not made its ring by then does not help."""
_LOOK_S: Final = 0.02
_IDLE_S: Final = 0.002


class Peer(Protocol):
    """The link between a helper's device and the target."""

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copies from the helper's memory, as it is mapped here; returns when the bytes are there."""
        ...


class HelpWay:
    """One helper. A :class:`prism.weights.loading.gpu_loader.Helper`."""

    def __init__(self, name: str, sock_path: Path, owner: memory.Owner, peer: Peer, ask: AskHelp) -> None:
        """``owner``: of the target's device, which maps the helper's memory."""
        self.name, self._path, self._owner, self.peer, self._ask = name, sock_path, owner, peer, ask
        self.books = WayBooks()

    def run(self, chunks: Chunks, target: int, halted: Callable[[], bool]) -> None:
        try:
            with packet_socket() as sock:
                sock.settimeout(_ANSWER_S)
                sock.connect(str(self._path))
                send(sock, self._ask)
                self._help(sock, chunks, target, halted)
        except DeadDriver:
            raise
        except (OSError, DeviceMemoryError) as error:
            log.warning("%s does not help to load: %s", self.name, error)
        finally:
            chunks.give_back(self.books)

    def _help(self, sock: socket.socket, chunks: Chunks, target: int, halted: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _ANSWER_S
        while not halted() and not chunks.over_for(self.books) and time.monotonic() < deadline_s:
            if not _readable(sock, _LOOK_S):
                continue
            packet, descriptors = receive(sock)
            try:
                if not isinstance(packet, Ring):
                    log.info("%s does not help to load: %s", self.name, _why(packet))
                    return
                pages = [(fd, *slot) for fd, slot in zip(descriptors, packet.slots, strict=True)]
                region = self._owner.import_region(pages)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            try:
                _Bringing(self, sock, region.address, packet, chunks, target).run(halted)
            finally:
                region.close()
            return


class _Bringing:
    """The ring is here: chunks are asked for, copied, and their slots used again."""

    def __init__(
        self, way: HelpWay, sock: socket.socket, address: int, ring: Ring, chunks: Chunks, target: int
    ) -> None:
        self._way, self._sock, self._chunks, self._target = way, sock, chunks, target
        self._at = [address + sum(nbytes for _, nbytes in ring.slots[:slot]) for slot in range(len(ring.slots))]
        self._free = list(range(len(ring.slots)))
        self._asked: dict[int, range] = {}

    def run(self, halted: Callable[[], bool]) -> None:
        books = self._way.books
        while not halted() and not self._chunks.over_for(books):
            self._ask()
            if not self._asked:  # enough is on its way over others: something may come back from them
                with self._chunks.changed:
                    self._chunks.changed.wait(_IDLE_S)
            if not _readable(self._sock, _LOOK_S if self._asked else 0.0):
                continue
            packet, _ = receive(self._sock)
            if not isinstance(packet, Staged):
                log.info("%s stops helping to load: %s", self._way.name, _why(packet))
                return
            if not self._bring(packet):
                return

    def _ask(self) -> None:
        while self._free and (chunk := self._chunks.take_for(self._way.books)) is not None:
            slot = self._free.pop()
            self._asked[slot] = chunk
            send(self._sock, StageChunk(slot=slot, first_leaf=chunk[0], end_leaf=chunk[-1] + 1))

    def _bring(self, staged: Staged) -> bool:
        """Copies what the slot has. False: the ring may have been given back meanwhile, and what was copied is not what
        was staged."""
        books, chunk = self._way.books, self._asked.pop(staged.slot)
        self._free.append(staged.slot)
        if not staged.good:
            self._chunks.give_back(books, [chunk])
        elif self._chunks.keeps(books, chunk):
            first = self._chunks.first_byte(chunk)
            self._way.peer.copy(self._at[staged.slot], self._target + first, self._chunks.nbytes(chunk))
            if _is_over(self._sock):
                return False
            self._chunks.brought(books, chunk)
        return True


def _readable(sock: socket.socket, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(timeout_s * 1e3))


def _is_over(sock: socket.socket) -> bool:
    """Whether the other side has closed the socket, which it does before it gives a ring back that is still in use."""
    poller = select.poll()
    poller.register(sock, 0)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poller.poll(0))


def _why(packet: Packet | None) -> str:
    return packet.why if isinstance(packet, HelpWithdrawn) else "it is gone"
