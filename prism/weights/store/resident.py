"""A pack that is ready to be read: its header, its bytes in shared host memory, and which of them are there already."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from prism.transfer.errors import SourceLost, TransferError
from prism.transfer.windows import LeafCut
from prism.weights.errors import CorruptBlock, WeightsError
from prism.weights.packs.format import PackHeader, PackKey, TensorEntry
from prism.weights.store.awaited_blocks import AwaitedBlocks
from prism.weights.store.disk_fill import WHOLE_TURN, FillLock, Turn, fill_from_disk, refetch
from prism.weights.store.host_copy import ARRIVED, CORRUPT, HostCopy, open_copy

_POLL_S: Final = 0.0005
_TAKEOVER_S: Final = 0.2
"""How long nothing may arrive before a waiting process asks whether the filler is still alive."""


Elsewhere = Callable[[PackHeader, int], bytes | None]
"""Fetches one leaf again from another place (another machine): its bytes, or None when nobody has them."""

logger = logging.getLogger(__name__)


class ResidentPack:
    """One pack in host memory, shared by all processes of the machine. Read-only; safe to use from several threads.

    A :class:`~prism.transfer.windows.Window` that others may be sent. Leaves may still be arriving: :meth:`wait_leaf`
    before reading them (:func:`prism.weights.loading.loader.load` does). ``fill_from`` is the packed file this process
    may go on filling from when the process that did so has died, ``turn`` the order in which it then does.
    ``mending_s``: see :class:`~prism.weights.store.weight_store.WeightStore`."""

    def __init__(
        self,
        copy: HostCopy,
        fill_from: Path | None,
        elsewhere: Elsewhere | None = None,
        turn: Turn = WHOLE_TURN,
        mending_s: float = 0.0,
    ) -> None:
        self._turn = turn
        self._awaited = AwaitedBlocks(copy.path, copy.header.key.model, mending_s, lambda: self.arrived_bytes)
        self._copy, self._fill_from, self._elsewhere = copy, fill_from, elsewhere
        self._fill_error: BaseException | None = None
        self._fill_thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()

    @property
    def header(self) -> PackHeader:
        return self._copy.header

    @property
    def cut(self) -> LeafCut:
        """The data area in leaves."""
        return self._copy.cut

    @property
    def key(self) -> PackKey:
        return self._copy.header.key

    @property
    def path(self) -> Path:
        """The file behind the shared memory."""
        return self._copy.path

    @property
    def data(self) -> memoryview:
        """The data area, ``header.data_bytes`` long; only leaves that have arrived mean anything."""
        return self._copy.data

    @property
    def address(self) -> int:
        """Of ``data`` in this process."""
        return self._copy.address

    @property
    def complete(self) -> bool:
        return self._copy.complete

    @property
    def arrived_bytes(self) -> int:
        return min(int((self._copy.arrival == ARRIVED).sum()) * self.header.leaf_bytes, self.header.data_bytes)

    def has(self, leaves: range) -> bool:
        """Whether all of ``leaves`` have arrived."""
        return self._copy.has(leaves)

    def is_corrupt(self, leaf: int) -> bool:
        """Whether ``leaf`` came with other bytes than were written, and nobody has mended it."""
        return bool(self._copy.arrival[leaf] == CORRUPT)

    def arrival_map(self) -> bytes:
        """The arrival map as it is now, one byte per leaf."""
        return self._copy.arrival.tobytes()

    def pin(self) -> HostCopy:
        """The copy mapped for writing (some networks register no other memory). Raises :class:`SourceLost`."""
        copy = open_copy(self.path, writable=True)
        if copy is None:
            raise SourceLost(f"{self.path}: was removed")
        return copy

    def send(self, sock: socket.socket, first: int, end: int) -> None:
        """See :meth:`prism.weights.store.host_copy.HostCopy.send`."""
        self._copy.send(sock, first, end)

    def tensor(self, name: str) -> tuple[TensorEntry, memoryview]:
        """Entry and bytes of a tensor by its name or an alias; waits for its bytes. Raises ``KeyError``."""
        for entry in self.header.tensors:
            if name == entry.name or name in entry.aliases:
                start = self.wait_tensor(entry)
                return entry, self.data[start : start + entry.nbytes]
        raise KeyError(name)

    def wait_tensor(self, entry: TensorEntry) -> int:
        """Where the tensor begins in the data area, once its bytes are here. Raises like :meth:`wait_leaf`."""
        start = self.header.blocks[entry.block].offset + entry.offset
        for leaf in self.cut.holding(start, start + entry.nbytes):
            self.wait_leaf(leaf)
        return start

    def private_copy(self) -> memoryview:
        """The data area as a writable mapping of its own: pages are copied when they are written to, and only then.
        Outlives :meth:`close`."""
        return self._copy.private_copy()

    def wait_leaf(self, leaf: int, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Blocks until ``leaf`` has arrived and was verified; False if ``cancelled`` says so first. One that is corrupt
        on disk, too, is waited for while the machine's agent may bring it from another machine.

        Raises :class:`CorruptBlock` naming the block, and what to do; or :class:`SourceLost` when nobody fills the copy
        any more and this process cannot either.
        """
        arrival = self._copy.arrival
        quiet_until = 0.0
        while arrival[leaf] != ARRIVED:
            awaited = self._mend(leaf)
            if cancelled():
                return False
            now = time.monotonic()
            if now >= quiet_until and not awaited:
                if quiet_until:
                    self._ensure_filler(leaf)
                quiet_until = now + _TAKEOVER_S
            time.sleep(_POLL_S)
        return True

    def tend(self, leaf: int) -> None:
        """For who does not wait: sees to it that ``leaf`` comes, as :meth:`wait_leaf` does, and raises like it."""
        if not self._mend(leaf) and self._copy.arrival[leaf] != ARRIVED:
            self._ensure_filler(leaf)

    def _mend(self, leaf: int) -> bool:
        """Whether the leaf is corrupt, and its being mended awaited. Raises :class:`CorruptBlock` if it will not be."""
        if self._copy.arrival[leaf] != CORRUPT:
            return False
        if not self._awaited.to_be_read_again(leaf):
            return True
        if self.repair(leaf):
            return False
        why_not = self._awaited.why_not(leaf)
        if why_not is not None and self._copy.arrival[leaf] == CORRUPT:
            try:
                self._copy.check(leaf)
            except CorruptBlock as error:
                raise error.because(why_not) from None
        return True

    def start_filling(self) -> bool:
        """Fills the copy from disk in a thread of this process; False if another process does so already."""
        with self._lock:
            if self._fill_thread is not None:
                return True
            if self._fill_from is None:
                return False
            lock = FillLock(self.path)
            if not lock.acquire():
                return False
            self._fill_thread = threading.Thread(target=self._fill, args=(lock,), name="weights-fill", daemon=True)
            self._fill_thread.start()
            return True

    def _fill(self, lock: FillLock) -> None:
        assert self._fill_from is not None
        try:
            copy = open_copy(self.path, writable=True)
            if copy is None:
                raise SourceLost(f"{self.path}: the copy in memory was removed while it was being filled")
            try:
                fill_from_disk(copy, self._fill_from, self._stop, self._turn)
            finally:
                copy.close()
        except (OSError, WeightsError, TransferError) as error:
            self._fill_error = error
        finally:
            lock.release()

    def _ensure_filler(self, leaf: int) -> None:
        thread = self._fill_thread
        if thread is not None and not thread.is_alive() and self._copy.arrival[leaf] != ARRIVED:
            raise SourceLost(f"{self.path}: filling it from disk failed") from self._fill_error
        if thread is None and not self.start_filling() and self._fill_from is None:
            lock = FillLock(self.path)
            if lock.acquire():
                lock.release()
                if self._copy.arrival[leaf] != ARRIVED:
                    raise SourceLost(f"{self.path}: whoever received it from other machines is gone")

    def repair(self, leaf: int) -> bool:
        """Replaces a corrupt leaf of the shared copy by bytes from disk, else from ``elsewhere``; True if it is right
        again. The damage is logged with the block it hit."""
        copy = open_copy(self.path, writable=True)
        if copy is None:
            return False
        try:
            repaired = refetch(copy, leaf, self._fill_from, self._elsewhere)
        finally:
            copy.close()
        if repaired or self._awaited.first_time(leaf):
            block = self.header.blocks_in_leaf(leaf)
            logger.warning("%s: block %s was corrupt (leaf %d); fetched again: %s", self.path, block, leaf, repaired)
        return repaired

    def close(self) -> None:
        """Stops filling (others take over) and lets the copy go. Views of ``data`` must not be used afterwards."""
        self._stop.set()
        if self._fill_thread is not None:
            self._fill_thread.join()
        self._copy.close()

    def __enter__(self) -> ResidentPack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
