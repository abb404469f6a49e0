"""The node agent's metrics: gauges from its own state once a second, counters as things happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prism.core.effects import GpuEffect, Hold, Route
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import devices_of
from prism.core.specs import DeviceSpec
from prism.core.views import InstanceState
from prism.obs import names
from prism.obs.metrics import Metrics
from prism.wire.reports import InstanceReport


class HeldMemory(Protocol):
    """What is read of a device's account."""

    def free_bytes(self) -> int: ...

    def foreign_bytes(self) -> int: ...

    def outside_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LongCounts:
    """Of one engine since its activation: prompts that are larger than the device."""

    begun: int
    brought_bytes: int
    """Of their KV, to the device."""


class NodeMeasures:
    """Writes what operators' dashboards show of one machine."""

    def __init__(self, metrics: Metrics, devices: Sequence[DeviceSpec]) -> None:
        self._metrics, self._devices = metrics, tuple(devices)
        self._shown: set[tuple[ModelName, DeviceId]] = set()
        self._lent: set[tuple[DeviceId, str]] = set()

    def decision(self, effect: GpuEffect | Hold) -> None:
        """A device's scheduler decided ``effect`` and it was carried out."""
        if not isinstance(effect, Route):
            self._metrics.decision(effect)

    def decided(self, seconds: float) -> None:
        self._metrics.observe(names.DECISION_SECONDS, seconds, scheduler="device")

    def engine_died(self, devices: Sequence[DeviceId]) -> None:
        for device in devices:
            self._metrics.inc(names.ENGINE_DEATHS, device=device)

    def held(self, model: str, device: DeviceId, seconds: float) -> None:
        """An engine of the model stood still for so long."""
        self._metrics.inc(names.HELD_SECONDS, max(0.0, seconds), model=model, device=device)

    def retracted(self, model: str, device: DeviceId, count: int) -> None:
        """``count`` running requests gave their memory up."""
        if count > 0:
            self._metrics.inc(names.RETRACTIONS, count, model=model, device=device)

    def kv_brought(self, model: str, device: DeviceId, tokens: int) -> None:
        """The KV of so many tokens came back from outside of an engine."""
        if tokens > 0:
            self._metrics.inc(names.KV_BROUGHT, tokens, model=model, device=device)

    def computed(self, model: str, device: DeviceId, tokens: int) -> None:
        """So many tokens were prefilled."""
        if tokens > 0:
            self._metrics.inc(names.COMPUTED_TOKENS, tokens, model=model, device=device)

    def long_prompts(self, model: str, device: DeviceId, before: LongCounts, now: LongCounts) -> None:
        """An engine that had begun ``before`` prompts larger than its device has begun ``now``."""
        if now.begun > before.begun:
            self._metrics.inc(names.LONG_PROMPTS, now.begun - before.begun, model=model, device=device)
        if now.brought_bytes > before.brought_bytes:
            nbytes = now.brought_bytes - before.brought_bytes
            self._metrics.inc(names.LONG_BROUGHT_BYTES, nbytes, model=model, device=device)

    def began_early(self, model: str, devices: Sequence[str]) -> None:
        """An engine serves before all its weights are there."""
        for device in devices:
            self._metrics.inc(names.LIVE_STARTS, model=model, device=device)

    def went_alone(self, model: str, seconds: float) -> None:
        """It has all its weights, so long after it began."""
        self._metrics.observe(names.LIVE_SECONDS, seconds, model=model)

    def activation(
        self, model: str, devices: Sequence[str], source: str, phases: Mapping[str, float], outcome: str
    ) -> None:
        """An activation ended; ``source`` says where the weights came from."""
        for device in devices:
            self._metrics.inc(names.ACTIVATIONS, model=model, device=device, source=source, outcome=outcome)
        if outcome == "ok":
            self._metrics.observe(names.ACTIVATION_SECONDS, phases["total"], model=model, source=source)
            for phase, seconds in phases.items():
                self._metrics.observe(names.ACTIVATION_PHASE_SECONDS, seconds, phase=phase)

    def helped(self, model: str, nbytes: Mapping[str, int]) -> None:
        """Of the weights of an activation, what came over other devices, by these."""
        for helper, brought in nbytes.items():
            self._metrics.inc(names.HELPED_BYTES, brought, model=model, helper=helper)

    def state(self, instances: Sequence[InstanceReport], accounts: Mapping[DeviceId, HeldMemory]) -> None:
        """Sets the gauges; models that left a device are set to zero there."""
        now: set[tuple[ModelName, DeviceId]] = set()
        for device in self._devices:
            here = [i for i in instances if device.id in devices_of(i.parts)]
            self._metrics.set(names.CAPACITY_BYTES, device.memory_bytes, device=device.id)
            account = accounts[device.id]
            beside = {"outside": account.outside_bytes(), "foreign": account.foreign_bytes()}
            used = device.memory_bytes - account.free_bytes() - sum(beside.values())
            # Weights of a model that is being loaded may be to come.
            weights = max(0, min(used, sum(i.weight_bytes for i in here)))
            for use, nbytes in beside.items():
                self._metrics.set(names.MAPPED_BYTES, nbytes, device=device.id, use=use)
            self._metrics.set(names.MAPPED_BYTES, weights, device=device.id, use="weights")
            self._metrics.set(names.MAPPED_BYTES, max(0, used - weights), device=device.id, use="kv")
            for model in {i.key.model for i in here}:
                self._model(model, device.id, [i for i in here if i.key.model == model])
                now.add((model, device.id))
        for model, gone in self._shown - now:
            self._model(model, gone, [])
        self._shown = now

    def lent(self, lent: Mapping[DeviceId, Mapping[str, int]]) -> None:
        """Bytes by lender and borrowing model; pairs that are gone are set to zero."""
        now = {(lender, borrower): nbytes for lender, of in lent.items() for borrower, nbytes in of.items()}
        for lender, borrower in self._lent | now.keys():
            nbytes = now.get((lender, borrower), 0)
            self._metrics.set(names.LENT_BYTES, nbytes, lender=lender, borrower=borrower)
        self._lent = set(now)

    def workers(self, counts: Mapping[DeviceId, Mapping[str, int]]) -> None:
        """Engine workers by device and state."""
        for device, states in counts.items():
            for state, count in states.items():
                self._metrics.set(names.ENGINES, count, device=device, state=state)

    def faults(self, reasons: Mapping[DeviceId, str]) -> None:
        """Devices that are out of service."""
        for device in self._devices:
            self._metrics.set(names.DEVICE_FAULT, float(device.id in reasons), device=device.id)

    def queue(self, device: DeviceId, length: int) -> None:
        self._metrics.set(names.QUEUE_LENGTH, length, queue=device)

    def _model(self, model: str, device: str, here: Sequence[InstanceReport]) -> None:
        """All instances of the model on the device: two for a moment when one takes over from another."""
        labels = {"model": model, "device": device}
        self._metrics.set(names.MODEL_ACTIVE, float(any(i.state is InstanceState.READY for i in here)), **labels)
        self._metrics.set(names.MODEL_BYTES, sum(i.weight_bytes for i in here), use="weights", **labels)
        self._metrics.set(names.MODEL_BYTES, sum(i.kv_bytes for i in here), use="kv", **labels)
        for tier, nbytes in (("host", "long_host_bytes"), ("lent", "long_lent_bytes")):
            self._metrics.set(names.LONG_BYTES, sum(getattr(i, nbytes) for i in here), tier=tier, **labels)
        self._metrics.set(names.DEVICE_RUNNING, sum(i.running for i in here), **labels)
        self._metrics.set(names.DEVICE_WAITING, sum(i.waiting for i in here), **labels)
