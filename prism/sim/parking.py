"""Engines that stand parked on a device until a model needs one.

A parked engine keeps what it built for the models that it had last (:mod:`prism.engine.skeletons`); one that comes back
to it serves sooner (``timing.wake``). Which one is taken: :meth:`prism.engine.parking.ParkedTeams.take`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey
from prism.sim.cluster_sections import TimingSection
from prism.sim.queue import EventQueue

Kept = tuple[ModelName, ...]
"""What an engine keeps of the models that it had, the latest last."""


@dataclass(slots=True)
class _Lot:
    """Of one device."""

    parked: int
    starting: int = 0
    """Engines that are being started to be parked."""
    kept: list[Kept] = field(default_factory=list)
    """Of those parked engines that keep something, the most recently used first."""


@dataclass(frozen=True, slots=True)
class Taken:
    """An engine for an activation."""

    in_s: float
    """When it is there; 0: it was parked."""
    wakes: bool
    """It keeps what it built for the model."""


class Parking:
    """Of all devices. ``per_device`` engines are kept ready on each; 0 with ``pooled`` False, when every activation
    starts a process of its own. ``kept_models``: of how many models an engine keeps what it built."""

    def __init__(
        self, queue: EventQueue, timing: TimingSection, per_device: int, kept_models: int, *, pooled: bool
    ) -> None:
        self._queue, self._timing, self._pooled = queue, timing, pooled
        self._per_device: Final = per_device if pooled else 0
        self._kept_models: Final = kept_models if pooled else 0
        self._lots: dict[DeviceId, _Lot] = {}
        self._used: dict[tuple[DeviceId, InstanceKey], Kept] = {}
        """What engines with a model keep of others."""

    def take(self, device: DeviceId, key: InstanceKey) -> Taken:
        """An engine of the device is taken."""
        if not self._pooled:
            return Taken(float(self._timing.engine_start), False)
        lot = self._lot(device)
        kept = self._choose(lot, key.model)
        self._used[device, key] = tuple(model for model in kept if model != key.model)
        lot.parked -= 1
        if lot.parked + lot.starting < self._per_device:
            self.replace(device)
        return Taken(0.0 if lot.parked >= 0 else float(self._timing.park), key.model in kept)

    def _choose(self, lot: _Lot, model: ModelName) -> Kept:
        """What the engine keeps that is taken: one that keeps ``model``, else one that keeps least."""
        if lot.parked <= 0:
            return ()  # it is started
        found = next((kept for kept in lot.kept if model in kept), None)
        if found is None:
            if lot.parked > len(lot.kept):
                return ()
            found = min(lot.kept, key=len)
        lot.kept.remove(found)
        return found

    def adopt(self, device: DeviceId) -> None:
        """An engine that runs already was once taken from the device's."""
        self._lot(device).parked -= int(self._pooled)

    def put_back(self, device: DeviceId, key: InstanceKey) -> None:
        """A model left its engine."""
        kept = self._used.pop((device, key), ())
        lot = self._lot(device)
        lot.parked += int(self._pooled)
        if self._kept_models:
            lot.kept.insert(0, (*kept, key.model)[-self._kept_models :])

    def lose(self, device: DeviceId, key: InstanceKey) -> None:
        """The engine of an instance is gone, and with it what it kept."""
        self._used.pop((device, key), None)
        self.replace(device)

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
