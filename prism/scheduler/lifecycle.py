"""Life of an instance, common to all policies: promise memory, command, serve, drain, gone. Effects count only once
they are answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from prism.core.effects import Activate, ClusterEffect, Deactivate, Route
from prism.core.events import ActivationFinished, InstanceFound
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey, devices_of, whole_model
from prism.core.reasons import Number, Reason, ReasonCode, because
from prism.core.settings import ClusterSettings
from prism.core.specs import ModelSpec
from prism.core.views import InstanceState
from prism.policy.demand import ExpectedRates
from prism.policy.pressure import Shard, least_kv_bytes
from prism.scheduler.fleet import Fleet, Instance, ModelState


@dataclass(frozen=True, slots=True)
class Room:
    """An answer to "where": these devices, once ``evict`` has left them."""

    devices: tuple[DeviceId, ...]
    evict: tuple[tuple[Instance, Reason], ...] = ()
    kv_cap_bytes: int | None = None
    numbers: tuple[tuple[str, Number], ...] = ()


@dataclass(frozen=True, slots=True)
class NoRoom:
    """An answer to "where": nowhere. ``refuse`` ends the requests that wait; None lets them wait on."""

    refuse: Reason | None = None
    retry_after_s: float | None = None
    waits: Reason | None = None
    """What it waits for, where that can be said."""


class Lifecycle(ABC):
    """The books and what changes them. Nothing here decides."""

    def __init__(self, settings: ClusterSettings, first_generation: int) -> None:
        self._next_generation = first_generation
        self.settings = settings
        self.fleet = Fleet()
        self.expected = ExpectedRates(dict(settings.expected_rates), settings.rate_window_s)
        self.models: dict[ModelName, ModelState] = {}
        self.loaded: dict[InstanceKey, Instance] = {}
        """All instances, in whatever state."""
        self.held: dict[InstanceKey, Instance] = {}
        """Instances that wait for others to leave."""
        self.last_devices: tuple[DeviceId, ...] = ()
        """Of the instance started last."""
        self._out: list[ClusterEffect] = []

    @abstractmethod
    def memory_freed(self, model: ModelState, now_s: float) -> None:
        """An instance of ``model`` is gone."""

    @abstractmethod
    def serves(self, model: ModelState) -> None:
        """An instance of ``model`` serves now."""

    def start(
        self, model: ModelState, room: Room, reason: Reason, now_s: float, replaces: InstanceKey | None = None
    ) -> Instance:
        """Promise the memory; send the command now or when those that must leave have left. ``replaces`` leaves once
        the new instance serves."""
        spec = model.spec
        min_kv_bytes = self.shard_kv_bytes(spec) if room.kv_cap_bytes is None else room.kv_cap_bytes
        instance = Instance(
            model=spec.name,
            generation=Generation(self._next_generation),
            devices=room.devices,
            shard=Shard(0.0, spec.shard_weight_bytes, min_kv_bytes),
            state=InstanceState.WAITING_FOR_ROOM,
            since_s=now_s,
            reason=reason,
            kv_cap_bytes=room.kv_cap_bytes,
            replaces=replaces,
        )
        self._next_generation += 1
        self.last_devices = room.devices
        self._enter_books(model, instance)
        for victim, why in room.evict:
            instance.waits_for.add(victim.key)
            self.stop(victim, why, now_s, carry=victim.busy)
        if instance.waits_for:
            self.held[instance.key] = instance
        self._send_if_ready(instance, now_s)
        return instance

    def adopt(self, model: ModelState, found: InstanceFound, now_s: float) -> None:
        """Take over an instance that an earlier scheduler has started."""
        instance = Instance(
            model=found.key.model,
            generation=found.key.generation,
            devices=devices_of(found.parts),
            shard=Shard(0.0, model.spec.shard_weight_bytes, self.shard_kv_bytes(model.spec)),
            state=InstanceState.ACTIVE,
            since_s=now_s,
            reason=because(ReasonCode.DEMAND),
            served=True,
        )
        self._next_generation = max(self._next_generation, found.key.generation + 1)
        self._enter_books(model, instance)
        self.route(model)
        self.serves(model)

    def _enter_books(self, model: ModelState, instance: Instance) -> None:
        model.instances.append(instance)
        self.loaded[instance.key] = instance
        self.fleet.put(instance)
        self._share_rate(model)

    def _send_if_ready(self, instance: Instance, now_s: float) -> None:
        if instance.state is InstanceState.WAITING_FOR_ROOM and not instance.waits_for:
            instance.enter(InstanceState.ACTIVATING, now_s)
            self.held.pop(instance.key, None)
            parts = whole_model(instance.devices)
            self._out.append(Activate(instance.key, parts, instance.reason, instance.kv_cap_bytes))

    def stop(self, instance: Instance, reason: Reason, now_s: float, carry: bool = False) -> None:
        """Let the instance leave. One that drains already is only hurried (``carry``)."""
        if instance.state is InstanceState.WAITING_FOR_ROOM:
            self.gone(instance, now_s)
            return
        if instance.state is InstanceState.DRAINING and (instance.carried or not carry):
            return
        model = self.models[instance.model]
        was_active = instance.state is InstanceState.ACTIVE
        if instance.state is not InstanceState.DRAINING:
            instance.enter(InstanceState.DRAINING, now_s)
            self.fleet.mark_busy(instance)
            self._share_rate(model)
        instance.carried = carry
        if was_active:
            self.route(model)
        self._out.append(Deactivate(instance.key, whole_model(instance.devices), carry, reason))

    def route(self, model: ModelState) -> None:
        devices = tuple(i.devices[0] for i in model.in_state(InstanceState.ACTIVE))
        self._out.append(Route(model.name, devices))

    def gone(self, instance: Instance, now_s: float) -> None:
        """Nothing of the instance is left: free its promise and wake those that waited for it."""
        model = self.models[instance.model]
        model.instances.remove(instance)
        del self.loaded[instance.key]
        self.held.pop(instance.key, None)
        self.fleet.take(instance)
        self._share_rate(model)
        if instance.state is InstanceState.ACTIVE:
            self.route(model)
        if model.removed and not model.instances:
            del self.models[model.name]
        for id in instance.devices:
            if (device := self.fleet.devices.get(id)) is not None:
                for other in list(device.instances.values()):
                    other.waits_for.discard(instance.key)
                    self._send_if_ready(other, now_s)
        self.memory_freed(model, now_s)

    def _activation_finished(self, event: ActivationFinished, now_s: float) -> None:
        instance = self.loaded.get(event.key)
        if instance is None or instance.state is not InstanceState.ACTIVATING:
            return  # it was told to leave in the meantime
        model = self.models[instance.model]
        known_s = model.activation_s
        model.activation_s = event.seconds if known_s is None else 0.7 * known_s + 0.3 * event.seconds
        instance.enter(InstanceState.ACTIVE, now_s)
        self.serves(model)
        old = self.loaded.get(instance.replaces) if instance.replaces is not None else None
        instance.replaces = None
        if old is not None and old.state is InstanceState.ACTIVE:
            self.stop(old, because(ReasonCode.MIGRATED, to=",".join(instance.devices)), now_s)
        else:
            self._share_rate(model)
            self.route(model)

    def refresh_rate(self, model: ModelState, now_s: float) -> None:
        """Bring the board up to the model's rate now. Rates of loaded models without arrivals decay only by this."""
        rate = model.rate.per_s(now_s) + self.expected.per_s(model.name, now_s)
        model.weighted_rate = rate / model.spec.slo_ttft_s
        self._share_rate(model)

    def _share_rate(self, model: ModelState) -> None:
        """Instances share their model's rate evenly; one that replaces another counts with what it takes over."""
        staying = [i for i in model.instances if i.state is not InstanceState.DRAINING]
        sharers = sum(i.replaces is None for i in staying) or 1
        for instance in model.instances:
            drains = instance.state is InstanceState.DRAINING
            self.fleet.set_rate(instance, 0.0 if drains else model.weighted_rate / sharers)

    def shard_kv_bytes(self, spec: ModelSpec) -> int:
        """Least KV memory that one shard of the model needs beside its weights."""
        return least_kv_bytes(spec, self.settings.min_kv_tokens)

    def activation_s(self, model: ModelState) -> float:
        """Expected time of an activation of the model."""
        return model.activation_s if model.activation_s is not None else self.settings.activation_guess_s
