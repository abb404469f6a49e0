"""Devices kept for models that starve: once a model has claimed a device, nobody else is placed there until it is.

Without a claim a model that needs much of a device could wait for ever: whenever something leaves, a smaller newcomer
takes the place. With it, everything on the device comes into a state in which it may be driven out within the longest
activation that is under way plus ``min_residency``; docs/policies.md has the whole argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from prism.core.ids import DeviceId, ModelName
from prism.scheduler.books import Books
from prism.scheduler.records import ModelRecord

_LOOK_EVERY_S = 0.5
"""Pause after a look in vain."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The devices, one per shard, that are kept for a model since ``since_s``."""

    devices: tuple[DeviceId, ...]
    since_s: float


class Claims:
    """At most one claim per model and per device. A claim ends when its model is placed or nobody waits any more."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._claims: dict[ModelName, Claim] = {}
        self._holders: dict[DeviceId, ModelName] = {}
        self._look_again_s: dict[ModelName, float] = {}
        """When a model that starves may look for devices to claim again."""

    def __bool__(self) -> bool:
        return bool(self._claims)

    def claim_of(self, model: ModelName) -> Claim | None:
        return self._claims.get(model)

    def others(self, model: ModelName) -> list[DeviceId]:
        """Devices that are kept for somebody else."""
        return [device for device, holder in self._holders.items() if holder != model]

    def begin_look(self, model: ModelRecord, now_s: float) -> bool:
        """Whether the model looks for devices to claim now; not at every attempt, since all devices are looked at."""
        again_s = self._look_again_s.get(model.name, float("-inf"))
        if now_s < again_s or len(self._holders) == len(self._books.fleet.devices):
            return False
        self._look_again_s[model.name] = now_s + _LOOK_EVERY_S
        return True

    def claim_devices(self, model: ModelName, devices: tuple[DeviceId, ...], now_s: float) -> None:
        """Keep ``devices``, which nobody has claimed, for ``model``."""
        self._claims[model] = Claim(devices, now_s)
        self._holders.update(dict.fromkeys(devices, model))

    def drop_ended(self) -> None:
        """Drop claims that have come to their end. To be called after every event."""
        devices = self._books.fleet.devices
        for name, claim in list(self._claims.items()):
            model = self._books.models.get(name)
            waits = model is not None and model.waiting > 0 and not model.removed and not model.coming_or_here
            in_service = all(d in devices and not devices[d].draining for d in claim.devices)
            if not waits or not in_service:
                del self._claims[name]
                for device in claim.devices:
                    del self._holders[device]
