"""Engines that stand parked on a device until a model needs one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prism.core.ids import DeviceId
from prism.sim.cluster_sections import TimingSection
from prism.sim.queue import EventQueue


@dataclass(slots=True)
class _Lot:
    """Of one device."""

    parked: int
    starting: int = 0
    """Engines that are being started to be parked."""


class Parking:
    """Of all devices. ``per_device`` engines are kept ready on each; 0 with ``pooled`` False, when every activation
    starts a process of its own."""

    def __init__(self, queue: EventQueue, timing: TimingSection, per_device: int, *, pooled: bool) -> None:
        self._queue, self._timing, self._pooled = queue, timing, pooled
        self._per_device: Final = per_device if pooled else 0
        self._lots: dict[DeviceId, _Lot] = {}

    def take(self, device: DeviceId) -> float:
        """An engine of the device is taken; returns the seconds until it can be (0 when one is parked)."""
        if not self._pooled:
            return float(self._timing.engine_start)
        lot = self._lot(device)
        lot.parked -= 1
        if lot.parked + lot.starting < self._per_device:
            self.replace(device)
        return 0.0 if lot.parked >= 0 else float(self._timing.park)

    def adopt(self, device: DeviceId) -> None:
        """An engine that runs already was once taken from the device's."""
        self._lot(device).parked -= int(self._pooled)

    def put_back(self, device: DeviceId) -> None:
        """A model left its engine."""
        self._lot(device).parked += int(self._pooled)

    def replace(self, device: DeviceId) -> None:
        """Start one more in the background: one is taken, or died."""
        self._lot(device).starting += 1
        self._queue.after(self._timing.park, self._started, device)

    def _started(self, device: DeviceId) -> None:
        lot = self._lot(device)
        lot.starting -= 1
        lot.parked += 1

    def _lot(self, device: DeviceId) -> _Lot:
        lot = self._lots.get(device)
        if lot is None:
            lot = self._lots[device] = _Lot(self._per_device)
        return lot
