"""What a GPU's processes take of it beside Prism's pages, and what strangers take: read from the driver, noted in the
account.

The driver's view of one GPU, and what the account has to know of it (:func:`attribute`)::

    |<------------------------------------ total ------------------------------------>|
    | pages of owners | beside, of their processes |    strangers    |      free      |
    |<--- charged to the owners ------------------>|<- foreign ->|<- never Prism's -->|
    |<------------------------------ capacity ------------------>|

Strangers first fill what is never Prism's; what they hold beyond it is missing from the capacity.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from prism.core.errors import PrismError
from prism.memory.device import Device
from prism.memory.errors import UnknownOwner
from prism.memory.stats import DeviceStats

MARGIN_BYTES: Final = 256 << 20
"""Kept free beside all that is counted: contexts grow by a few MiB when kernels are loaded, and processes start."""
FOREIGN_WINDOW_S: Final = 10.0
"""What strangers held at most within this time is what counts: memory that comes and goes is not given to engines."""
LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One look at a GPU."""

    free_bytes: int
    processes: Mapping[int, int]
    """pid -> all that it holds. Processes of other PID namespaces are not named, nor is any where the driver does not
    tell."""


class GpuLost(PrismError):
    """The driver has lost the GPU (it fell off the bus, or must be reset): nothing runs there any more."""


class Meter(Protocol):
    """Looks at one GPU without using it."""

    def look(self) -> GpuUse:
        """Raises :class:`GpuLost`, or what the driver's library raises when it does not answer."""
        ...


@dataclass(frozen=True, slots=True)
class Attribution:
    """Facts for :meth:`Device.note_outside` and :meth:`Device.note_foreign`."""

    outside: Mapping[int, int]
    """Owner id -> bytes; owners whose process the driver did not name are missing."""
    foreign_bytes: int


def attribute(use: GpuUse, books: DeviceStats) -> Attribution:
    """Who holds what is in use. Pages are taken from the books, so both must be of one moment.

    An owner whose process is not named counts with what it was granted; what it really takes beyond is then foreign.
    """
    pages: dict[int, int] = {}
    for owner in books.owners:
        pages[owner.pid] = pages.get(owner.pid, 0) + owner.physical_bytes
    outside: dict[int, int] = {}
    for owner in books.owners:
        if owner.pid in use.processes:  # several owners in one process: the first has it
            first = not any(other.pid == owner.pid for other in books.owners if other.id in outside)
            outside[owner.id] = max(0, use.processes[owner.pid] - pages[owner.pid]) if first else 0
    known = sum(pages.values()) + sum(outside.get(owner.id, owner.granted_bytes) for owner in books.owners)
    return Attribution(outside, max(0, books.capacity_bytes - (use.free_bytes - MARGIN_BYTES) - known))


class SlidingMaximum:
    """The greatest of the values noted within the last ``window_s``."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._falling: deque[tuple[float, int]] = deque()
        """``(when, value)``, each less than those before it."""

    def note(self, value: int, now_s: float) -> int:
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now_s, value))
        while self._falling[0][0] < now_s - self._window_s:
            self._falling.popleft()
        return self._falling[0][1]


class MemoryWatch:
    """Keeps one device's account true to what the driver sees. Call :meth:`look` every second."""

    def __init__(self, device: Device, meter: Meter) -> None:
        self._device, self._meter = device, meter
        self._foreign = SlidingMaximum(FOREIGN_WINDOW_S)

    def look(self, now_s: float) -> None:
        """Note what is found; nothing while pages come and go so fast that no two looks agree. Raises as the meter
        does; of a lost GPU nothing is left for anybody."""
        for _ in range(LOOKS):
            before = self._device.stats()
            try:
                use, books = self._meter.look(), self._device.stats()
            except GpuLost:
                self._device.note_foreign(before.capacity_bytes)
                raise
            if _pages(before) == _pages(books):
                return self._note(attribute(use, books), now_s)
        return None

    def _note(self, found: Attribution, now_s: float) -> None:
        for owner, nbytes in found.outside.items():
            try:
                self._device.note_outside(owner, nbytes)
            except UnknownOwner:
                continue  # it has left since
        self._device.note_foreign(self._foreign.note(found.foreign_bytes, now_s))


def _pages(books: DeviceStats) -> dict[int, int]:
    return {owner.id: owner.physical_bytes for owner in books.owners}


class NvmlMeter:
    """The driver's management library about the GPU with this UUID. Stays open until the process ends."""

    def __init__(self, uuid: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pynvml
        self._nvml: Any = pynvml
        self._uuid = uuid
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def look(self) -> GpuUse:
        nvml = self._nvml
        try:
            return self._look()
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
            raise GpuLost(f"{self._uuid} is lost to the driver: {error}") from error

    def _look(self) -> GpuUse:
        nvml, processes = self._nvml, {}
        for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetMPSComputeRunningProcesses):
            try:
                found = ask(self._handle)
            except nvml.NVMLError_NotSupported:
                continue
            processes.update({p.pid: int(p.usedGpuMemory) for p in found if p.usedGpuMemory is not None})
        return GpuUse(int(nvml.nvmlDeviceGetMemoryInfo(self._handle).free), processes)
