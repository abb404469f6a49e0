"""The helping side of loading over helpers: a process whose device is not the target's stages chunks in its memory."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from prism import memory
from prism.memory import WeightRegion
from prism.memory.errors import DeviceMemoryError, OutOfMemory
from prism.weights.loading.filling import checksum, fill
from prism.weights.loading.gpu_loader import Lane
from prism.weights.loading.help_wire import AskHelp, HelpWithdrawn, Packet, Ring, StageChunk, Staged, receive, send
from prism.weights.store.host_copy import HostCopy, open_copy

log = logging.getLogger(__name__)

_ASK_S: Final = 1.0
_LET_GO_S: Final = 1.0
"""How long a load may take to stop using a ring that is wanted back."""
_LOOK_S: Final = 0.02
SLOTS_BESIDE_LANES: Final = 2
"""Slots that are copied from, or wait to be, while the lanes fill others."""

LanesFor = Callable[[int], Sequence[Lane]]
"""Lanes into the helper's own device, whose buffers hold so many bytes."""


def help_load(
    sock: socket.socket,
    owner: memory.Owner,
    lanes_for: LanesFor,
    why_leave: Callable[[], str],
    also: Iterable[int] = (),
) -> int:
    """Serves the load at the other end of ``sock`` until that ends it, or ``why_leave`` gives a reason to withdraw,
    which is asked often, and at once when a descriptor of ``also`` is readable. Returns the bytes staged.

    Memory for the ring is charged to ``owner`` and given back before this returns. Raises
    :class:`prism.memory.errors.DeadDriver`; what the other side does wrong ends the help only.
    """
    sock.settimeout(_ASK_S)
    with contextlib.suppress(OSError):
        packet, _ = receive(sock)
        if not isinstance(packet, AskHelp):
            return 0
        if why := why_leave():
            send(sock, HelpWithdrawn(why=why))
            return 0
        copy = open_copy(Path(packet.path))
        if copy is None:
            send(sock, HelpWithdrawn(why="there is no such copy in host memory"))
            return 0
        try:
            return _with_ring(sock, owner, lanes_for(packet.chunk_bytes), packet, copy, why_leave, tuple(also))
        finally:
            copy.close()
    return 0


def _with_ring(
    sock: socket.socket,
    owner: memory.Owner,
    lanes: Sequence[Lane],
    ask: AskHelp,
    copy: HostCopy,
    why_leave: Callable[[], str],
    also: tuple[int, ...],
) -> int:
    slot_bytes = -(-ask.chunk_bytes // owner.page_bytes) * owner.page_bytes
    region = owner.staging_region((len(lanes) + SLOTS_BESIDE_LANES) * slot_bytes, slot_bytes)
    try:
        try:
            region.commit()
        except OutOfMemory as error:
            send(sock, HelpWithdrawn(why=str(error)))
            return 0
        _send_ring(sock, region)
        staging = _Staging(sock, region, slot_bytes, lanes, ask.verify, copy)
        with ThreadPoolExecutor(len(lanes), thread_name_prefix="weights-help") as pool:
            try:
                _serve(sock, staging, pool, why_leave, also)
            finally:
                staging.stopped = True
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # before the ring goes: the load sees that what it copies now is no good
        return staging.staged_bytes
    finally:
        sock.close()
        for lane in lanes:
            lane.settle()
        region.close()


def _send_ring(sock: socket.socket, region: WeightRegion) -> None:
    pages = region.export_pages()
    try:
        ring = Ring(slots=[(offset, nbytes) for _, offset, nbytes in pages])
        send(sock, ring, [descriptor for descriptor, _, _ in pages])
    finally:
        for descriptor, _, _ in pages:
            os.close(descriptor)


def _serve(
    sock: socket.socket,
    staging: _Staging,
    pool: ThreadPoolExecutor,
    why_leave: Callable[[], str],
    also: tuple[int, ...],
) -> None:
    poller = select.poll()
    for descriptor in (sock.fileno(), *also):
        poller.register(descriptor, select.POLLIN)
    while not staging.failed:
        ready = {descriptor for descriptor, _ in poller.poll(_LOOK_S * 1e3)}
        why = "its worker is wanted" if ready & set(also) else why_leave()
        if why:
            staging.stopped = True
            staging.send(HelpWithdrawn(why=why))
            _until_let_go(sock)
            return
        if sock.fileno() in ready:
            packet, _ = receive(sock)
            if not isinstance(packet, StageChunk) or not staging.can(packet):
                return
            pool.submit(staging.stage, packet)


def _until_let_go(sock: socket.socket) -> None:
    """The load has heard that the ring is wanted back: until it has let it go, or for a while."""
    deadline_s = time.monotonic() + _LET_GO_S
    while time.monotonic() < deadline_s:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        if receive(sock)[0] is None:
            return


class _Staging:
    """What the threads of one help share."""

    def __init__(
        self,
        sock: socket.socket,
        region: WeightRegion,
        slot_bytes: int,
        lanes: Sequence[Lane],
        verify: bool,
        copy: HostCopy,
    ) -> None:
        self._sock, self._region, self._slot_bytes, self._verify, self._copy = sock, region, slot_bytes, verify, copy
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in lanes:
            self._lanes.put(lane)
        self._guard = threading.Lock()
        self.staged_bytes = 0
        self.stopped = self.failed = False

    def can(self, ask: StageChunk) -> bool:
        header = self._copy.header
        if not 0 <= ask.first_leaf < ask.end_leaf <= header.leaves:
            return False
        nbytes = header.leaf_range(ask.end_leaf - 1)[1] - header.leaf_range(ask.first_leaf)[0]
        return nbytes <= self._slot_bytes and 0 <= ask.slot < self._region.nbytes // self._slot_bytes

    def stage(self, ask: StageChunk) -> None:
        lane = self._lanes.get()
        try:
            if not self.stopped:
                self._stage(ask, lane)
        except (OSError, DeviceMemoryError, RuntimeError) as error:  # CuPy's errors are runtime errors
            log.warning("helping to load %s ends: %s", self._copy.header.key, error)
            self.failed = True
        finally:
            self._lanes.put(lane)

    def _stage(self, ask: StageChunk, lane: Lane) -> None:
        chunk, header = range(ask.first_leaf, ask.end_leaf), self._copy.header
        if self._verify and any(checksum(self._copy, leaf) != header.leaf_sum(leaf) for leaf in chunk):
            self.send(Staged(slot=ask.slot, good=False))
            return
        nbytes = header.leaf_range(chunk[-1])[1] - header.leaf_range(chunk[0])[0]
        fill(self._copy, chunk, lane.buffers[0])
        lane.send(0, self._region.address + ask.slot * self._slot_bytes, nbytes)
        lane.wait(0)
        with self._guard:
            self.staged_bytes += nbytes
        self.send(Staged(slot=ask.slot))

    def send(self, packet: Packet) -> None:
        with self._guard:
            send(self._sock, packet)
