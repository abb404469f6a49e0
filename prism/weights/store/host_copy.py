"""One copy of a pack in host memory, mapped by every process of the machine that uses it.

The copy is a file in a memory file system: header, data area and behind it the *arrival map*, one byte per leaf::

    | header | data area | 0 1 1 2 0 ... |     0 absent, 1 arrived and verified, 2 corrupt

so that a process may use the leaves that have arrived while another still fills the rest (from disk or from other
machines). Bytes are written before their mark; a mark never goes from 1 back. Every user holds a shared lock on the
file, which is what keeps reclaim away from it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import uuid
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from prism.memory import make_huge
from prism.transfer.windows import THERE, MemorySpan
from prism.weights.errors import CorruptBlock
from prism.weights.packs.format import PAGE_BYTES, PackHeader, align, encode_header
from prism.weights.packs.pack_files import read_header
from prism.weights.store.locks import still_named, try_lock

_POPULATE_WRITE: Final = 23
"""Linux 5.14's MADV_POPULATE_WRITE, which this Python has no name for."""
_POPULATE_BYTES: Final = 4 << 20
ABSENT: Final = 0
ARRIVED: Final = THERE
CORRUPT: Final = 2


class HostCopy:
    """A mapped copy. ``data`` is writable only in a process that fills (``writable``); all others map it read-only. A
    writable one is a :class:`~prism.transfer.windows.Landing`."""

    def __init__(self, path: Path, fd: int, lock: int, header: PackHeader, start: int, writable: bool) -> None:
        self.path, self.header, self._lock, self._start = path, header, lock, start
        self._populated = False
        map_at = start + align(header.data_bytes, PAGE_BYTES)
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._map = mmap.mmap(fd, map_at + max(header.leaves, 1), mmap.MAP_SHARED, access)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.data = memoryview(self._map)[start : start + header.data_bytes]
        self.address = int(whole.ctypes.data) + start
        """Of the first byte of the data area, in this process."""
        self.arrival: npt.NDArray[np.uint8] = whole[map_at : map_at + header.leaves]
        self.cut = header.cut
        self.span = MemorySpan(self.address, header.data_bytes)

    @property
    def complete(self) -> bool:
        return bool((self.arrival == ARRIVED).all())

    @property
    def damaged(self) -> bool:
        """A leaf is marked corrupt."""
        return bool((self.arrival == CORRUPT).any())

    def has(self, leaves: range) -> bool:
        """Whether all of ``leaves`` have arrived."""
        marks = self.arrival[leaves.start : leaves.stop].tobytes()  # asked often: a comparison costs tenfold
        return marks.count(ARRIVED) == len(marks)

    def view(self, first: int, end: int) -> memoryview:
        """Bytes ``first .. end`` of the data area."""
        return self.data[first:end]

    def mark(self, leaf: int) -> bool:
        """Verifies ``leaf`` as it lies in memory and records the result; True if its checksum is right."""
        start, end = self.header.leaf_range(leaf)
        return self.note(leaf, xxhash.xxh3_64_intdigest(self.data[start:end]))

    def accept(self, leaf: int) -> bool:
        """Like :meth:`mark`, but a leaf whose checksum is wrong counts as not having arrived (it is fetched again)."""
        start, end = self.header.leaf_range(leaf)
        if xxhash.xxh3_64_intdigest(self.data[start:end]) != self.header.leaf_sum(leaf):
            return False
        self.arrival[leaf] = ARRIVED
        return True

    def check(self, leaf: int) -> None:
        """Raises :class:`CorruptBlock` if ``leaf`` is marked corrupt."""
        if self.arrival[leaf] == CORRUPT:
            start, end = self.header.leaf_range(leaf)
            found = xxhash.xxh3_64_intdigest(self.data[start:end])
            raise CorruptBlock(self.path, self.header.blocks_in_leaf(leaf), leaf, self.header.leaf_sum(leaf), found)

    def write(self, first: int, data: memoryview) -> None:
        """Puts ``data`` at byte ``first`` of the data area by a system call, which costs less than half of what a
        mapping's page faults cost. Raises ``OSError`` (ENOSPC) when memory was not reserved and is gone."""
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._lock, data[done:], self._start + first + done)

    def send(self, sock: socket.socket, first: int, end: int) -> None:
        """Sends bytes ``first .. end`` of the data area, which must have arrived: the kernel hands their pages to the
        network as they are, no copy is made and none is mapped here. Raises ``TimeoutError`` after the socket's timeout
        without a byte taken, ``OSError``."""
        timeout_s = sock.gettimeout()
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        while first < end:
            try:
                first += os.sendfile(sock.fileno(), self._lock, self._start + first, end - first)
            except BlockingIOError:
                if not writable.poll(None if timeout_s is None else timeout_s * 1e3):
                    raise TimeoutError(f"{self.path}: a receiver took nothing for {timeout_s} s") from None

    def populate(self, first: int, nbytes: int) -> None:
        """Maps pages of the data area for writing with one call, at half the cost of a fault for each. Where the system
        cannot, they are mapped as they are written."""
        at = (self._start + first) // PAGE_BYTES * PAGE_BYTES
        end = self._start + first + nbytes
        if self._populated or nbytes <= 0:
            return
        with contextlib.suppress(OSError):
            while at < end:  # the call keeps this process's other threads from running
                self._map.madvise(_POPULATE_WRITE, at, min(_POPULATE_BYTES, end - at))
                at += _POPULATE_BYTES
        self._populated = first == 0 and nbytes == self.header.data_bytes

    def note(self, leaf: int, found: int) -> bool:
        """Marks a leaf that was written with bytes whose checksum is ``found``; True if it is right."""
        good = found == self.header.leaf_sum(leaf)
        self.arrival[leaf] = ARRIVED if good else CORRUPT
        return good

    def private_copy(self) -> memoryview:
        """See :meth:`prism.weights.store.resident.ResidentPack.private_copy`."""
        fd = os.open(f"/proc/self/fd/{self._lock}", os.O_RDONLY | os.O_CLOEXEC)  # not the one with the lock: see _map
        try:
            length = self._start + self.header.data_bytes
            mapping = mmap.mmap(fd, length, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        return memoryview(mapping)[self._start :]

    def close(self) -> None:
        """Drops the mapping (once nobody in this process holds a view of it) and the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            self.data = memoryview(b"")
            self.arrival = np.empty(0, dtype=np.uint8)


def create(path: Path, header: PackHeader, reserve: bool = True) -> None:
    """Makes an empty copy at ``path`` unless there is one. All its memory is reserved here: raises ``OSError``
    (ENOSPC) when the file system has not enough, rather than a bus error at some later write. Without ``reserve`` only
    room is looked for, and pages are made as they are written (:meth:`HostCopy.write`)."""
    raw = encode_header(header)
    map_at = len(raw) + align(header.data_bytes, PAGE_BYTES)
    size = map_at + max(header.leaves, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if not reserve:
            room = os.fstatvfs(fd)
            if room.f_bavail * room.f_frsize < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        else:
            make_huge(fd, 0, size)  # three times as fast as small ones, which the rest is made of
        for at, nbytes in ((0, size),) if reserve else ((0, len(raw)), (map_at, size - map_at)):
            os.posix_fallocate(fd, at, nbytes)
        os.pwrite(fd, raw, 0)
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.close(fd)
        temporary.unlink()


def open_copy(path: Path, writable: bool = False) -> HostCopy | None:
    """The copy at ``path``, locked against reclaim; None if there is none. Raises :class:`BadPack`."""
    while True:
        try:
            lock = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if try_lock(lock, exclusive=False) and still_named(lock, path):
                return _map(path, lock, writable)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # being reclaimed: gone in a moment


def _map(path: Path, lock: int, writable: bool) -> HostCopy:
    # a mapping keeps a duplicate of its descriptor, and with it the lock: so it gets one of its own
    fd = os.open(f"/proc/self/fd/{lock}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        header, start = read_header(fd, path)
        return HostCopy(path, fd, lock, header, start, writable)
    finally:
        os.close(fd)
