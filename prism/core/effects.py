"""What the schedulers want done. The owner of the state re-checks the generation an effect carries, carries it out and
answers with an event; only then does it count.

``decision_line`` gives the stable JSON line of one decision (decision log, golden tests, simulator).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from prism.core.ids import DeviceId, ModelName, RequestId
from prism.core.instances import InstanceKey, Parts, devices_of
from prism.core.reasons import Reason
from prism.core.settings import LiveMode

# --- one device ---


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Hand the request to this instance's engine now. ``FirstToken`` follows, then ``Finished`` or ``AttemptLost``."""

    id: RequestId
    key: InstanceKey
    reason: Reason

    @property
    def model(self) -> ModelName:
        return self.key.model


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the request with 429 (503 for memory) and ``Retry-After``; the scheduler has forgotten it."""

    id: RequestId
    model: ModelName
    reason: Reason
    retry_after_s: float | None
    """None: trying again as it is will not help."""
    detail: str = ""
    """What the engine says about it."""


@dataclass(frozen=True, slots=True)
class SendBack:
    """Put the request into the inactive queue (hops + 1); the scheduler has forgotten it."""

    id: RequestId
    model: ModelName
    reason: Reason


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop a dispatched request in its engine; the scheduler has forgotten it."""

    id: RequestId
    model: ModelName
    reason: Reason


GpuEffect = Dispatch | Refuse | SendBack | Abort


@dataclass(frozen=True, slots=True)
class Hold:
    """The instance's engine makes no decode step for ``for_s`` from the end of the one in progress on, unless it is
    held again; prompts are not held."""

    key: InstanceKey
    for_s: float
    reason: Reason

    @property
    def model(self) -> ModelName:
        return self.key.model


# --- the cluster ---


@dataclass(frozen=True, slots=True)
class Activate:
    """Make an instance of these parts, named ``key`` from here on; answered by ``ActivationFinished`` when all parts
    are ready, or by ``ActivationFailed`` when nothing is left of any."""

    key: InstanceKey
    parts: Parts
    reason: Reason
    kv_cap_bytes: int | None = None
    """Fixed KV share on each of the devices (``static`` and the ablation without elastic memory); None: elastic."""
    live: LiveMode = LiveMode.WHOLE
    """Whether it may serve before its weights are there (``WHOLE`` or ``PAIR``)."""

    @property
    def model(self) -> ModelName:
        return self.key.model

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """All devices of all parts."""
        return devices_of(self.parts)


@dataclass(frozen=True, slots=True)
class Deactivate:
    """Let the instance leave: drain it (``carry`` False: running requests finish there first) or move its running
    requests to the inactive queue with their tokens at once (``carry`` True; may follow a drain that takes too long).
    Answered by ``DeactivationFinished``, once. Also valid while the instance still loads."""

    key: InstanceKey
    parts: Parts
    carry: bool
    reason: Reason

    @property
    def model(self) -> ModelName:
        return self.key.model

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """All devices of all parts."""
        return devices_of(self.parts)


@dataclass(frozen=True, slots=True)
class Route:
    """New requests of ``model``, and those in the inactive queue, go to the queue of one of ``devices`` (the queue
    devices of the instances that serve); empty: to the inactive queue. Replaces the model's last route."""

    model: ModelName
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True)
class RefuseWaiting:
    """End requests of ``model`` that stand in the inactive queue, with this reason: all of them, or those that arrived
    before ``arrived_before_s``, or all but the oldest ``keep``."""

    model: ModelName
    reason: Reason
    retry_after_s: float | None
    """None: trying again as it is will not help (too large for every device, weights corrupt)."""
    detail: str = ""
    arrived_before_s: float | None = None
    keep: int = 0


@dataclass(frozen=True, slots=True)
class ShareWaiting:
    """The instance hands all but a part of the requests that wait for it on ``device``, its queue device, to the
    inactive queue, the last in its order: other instances have come up. They are routed from there at once."""

    key: InstanceKey
    device: DeviceId
    kept_share: float
    """Of those that wait when this arrives (0..1)."""
    reason: Reason


ClusterEffect = Activate | Deactivate | Route | RefuseWaiting | ShareWaiting

Effect = GpuEffect | Hold | ClusterEffect


def decision_record(effect: Effect, now_s: float) -> dict[str, object]:
    """The effect as JSON values: time, kind, its fields. An instance is shown as model, devices and generation, its
    parts, and how it begins, when there is more to say of them."""
    record: dict[str, object] = {"at_s": round(now_s, 6), "do": type(effect).__name__}
    for field in fields(effect):
        value = getattr(effect, field.name)
        if isinstance(value, InstanceKey):
            record["model"] = value.model
            if isinstance(effect, Activate | Deactivate):
                record["devices"] = effect.devices
            record["generation"] = value.generation
        elif field.name == "parts":
            if not all(part.is_whole_model for part in value):
                record["parts"] = [part.as_dict() for part in value]
        elif value is not LiveMode.WHOLE:
            record[field.name] = value.as_dict() if isinstance(value, Reason) else value
    return record


def decision_line(effect: Effect, now_s: float) -> str:
    """One line of the decision log, the same bytes for the same decision."""
    record = decision_record(effect, now_s)
    rounded = {key: value if key == "at_s" else _rounded(value) for key, value in record.items()}
    return json.dumps(rounded, separators=(",", ":"), sort_keys=False)


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.9g}") if abs(value) != float("inf") else str(value)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value
