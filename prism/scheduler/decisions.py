"""What a policy may answer: where a model goes, and what is to be done. Values; :class:`.cluster.ClusterScheduler`
carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey, Parts, devices_of, whole_model
from prism.core.reasons import Number, Reason
from prism.core.settings import LiveMode
from prism.scheduler.records import InstanceRecord, ModelRecord


@dataclass(frozen=True, slots=True)
class Room:
    """An answer to "where": these parts, once ``evict`` has left their devices."""

    parts: Parts
    evict: tuple[tuple[InstanceRecord, Reason], ...] = ()
    kv_cap_bytes: int | None = None
    numbers: tuple[tuple[str, Number], ...] = ()

    @classmethod
    def on(
        cls,
        devices: tuple[DeviceId, ...],
        evict: tuple[tuple[InstanceRecord, Reason], ...] = (),
        kv_cap_bytes: int | None = None,
        numbers: tuple[tuple[str, Number], ...] = (),
    ) -> Room:
        """For the whole model as one group of ranks on ``devices``."""
        return cls(whole_model(devices), evict, kv_cap_bytes, numbers)

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """All devices of all parts."""
        return devices_of(self.parts)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """An answer to "where": nowhere. ``refuse`` ends the requests that wait; None lets them wait on."""

    refuse: Reason | None = None
    retry_after_s: float | None = None
    waits: Reason | None = None
    """What it waits for, where that can be said."""


def wait_or_refuse(model: ModelRecord, reason: Reason, activation_s: float, now_s: float) -> NoRoom:
    """Wait on, until the starvation bound of the oldest request is reached."""
    if model.waiting == 0 or now_s - model.waiting_since_s < model.spec.max_wait_s:
        return NoRoom()
    return NoRoom(reason, max(1.0, activation_s))


@dataclass(frozen=True, slots=True)
class StartInstance:
    """A further instance of the model, in this room. ``replaces`` leaves once the new one serves (a migration);
    ``follows`` has to have left, of itself, before this one is loaded."""

    model: ModelRecord
    room: Room
    reason: Reason
    replaces: InstanceKey | None = None
    follows: InstanceKey | None = None
    live: LiveMode | None = None
    """When it begins to serve; None: as the settings say."""


@dataclass(frozen=True, slots=True)
class StopInstance:
    """The instance leaves; ``carry``: with its running requests. One that drains already is only hurried."""

    instance: InstanceRecord
    reason: Reason
    carry: bool = False


@dataclass(frozen=True, slots=True)
class WantModel:
    """The model should be loaded, wherever it finds room."""

    model: ModelRecord
    reason: Reason


Decision = StartInstance | StopInstance | WantModel
