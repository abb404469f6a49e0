"""What happens to the fleet from outside: reports, losses, a changed catalog, operators."""

from __future__ import annotations

from prism.core.effects import Deactivate
from prism.core.events import ActivationError, DeviceReport, InstanceFound, OperatorDrain, OperatorLoad, OperatorUnload
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import devices_of
from prism.core.reasons import ReasonCode, because
from prism.core.specs import ModelSpec
from prism.core.views import InstanceState
from prism.policy.demand import SlidingRate
from prism.scheduler.fleet import DeviceState, Instance, ModelState
from prism.scheduler.lifecycle import Room
from prism.scheduler.wanting import Wanting


class Operations(Wanting):
    """Takes in what owners of devices, the catalog's file and operators say."""

    def catalog_changed(self, now_s: float) -> None:
        """Called when a change of the catalog has been taken in."""

    def device_reported(self, device: DeviceId, now_s: float) -> None:
        """Called when a device's report has been taken in."""

    def rests(self, instance: Instance, now_s: float) -> None:
        """Called with each report of an active instance that has no request."""

    def _device_report(self, event: DeviceReport, now_s: float) -> None:
        if not self.fleet.report(event, now_s):
            return
        for load in event.instances:
            instance = self.loaded.get(load.key)
            if instance is None or instance.devices[0] != event.device:
                continue
            instance.running, instance.waiting, instance.kv_bytes = load.running, load.waiting, load.kv_bytes
            if instance.state is not InstanceState.ACTIVE:
                continue
            rested = now_s - instance.since_s >= self.settings.min_residency_s
            instance.served = instance.served or load.served > 0 or load.running > 0 or rested
            model = self.models[instance.model]
            if load.served:
                model.stillborn = 0
            if instance.busy or model.waiting:
                self.fleet.mark_busy(instance)
                model.idle_since_s = None
            else:
                self.fleet.mark_idle(instance, load.idle_s, now_s)
                model.idle_since_s = model.resting_since_s
                self.rests(instance, now_s)
        device = self.fleet.devices[event.device]
        if device.draining and device.instances:
            self._vacate([device], now_s)
        self.device_reported(event.device, now_s)

    def _lost(self, instance: Instance, now_s: float, stillborn: str = "") -> None:
        """It is gone without having been told to: replace it if anybody needs it. ``stillborn``: see
        :class:`InstanceLost`."""
        if instance.state is InstanceState.ACTIVATING:
            self._activation_failed(instance, ActivationError.ENGINE_DIED, "the engine was lost while loading", now_s)
            return
        model = self.models[instance.model]
        served = instance.state is InstanceState.ACTIVE
        needed = served and (instance.busy or instance.idle_since_s is None)
        if stillborn and not model.removed:
            self._record_stillborn(model, stillborn, now_s)
        self.gone(instance, now_s)
        if model.removed:
            return
        if needed or model.pinned:
            model.want = model.want or because(ReasonCode.LOST, devices=",".join(instance.devices))
        if model.want is not None or model.waiting:
            self.want(model, now_s)

    def _devices_lost(self, devices: list[DeviceId], now_s: float) -> None:
        for instance in self.fleet.leave(devices):
            if instance.state is InstanceState.ACTIVATING:
                instance.state = InstanceState.WAITING_FOR_ROOM  # not the model's fault: no failure is counted
            if instance.key in self.loaded:
                self._lost(instance, now_s)

    def _instance_found(self, event: InstanceFound, now_s: float) -> None:
        model, devices = self.models.get(event.key.model), devices_of(event.parts)
        if event.key in self.loaded:
            return
        here = all(d in self.fleet.devices for d in devices)
        if model is None or model.removed or not here or len(devices) != model.spec.tp:
            self._out.append(Deactivate(event.key, event.parts, False, because(ReasonCode.STALE)))
            return
        self.adopt(model, event, now_s)

    # --- catalog and operators ---

    def _upsert(self, spec: ModelSpec, now_s: float) -> None:
        model = self.models.get(spec.name)
        if model is None:
            model = ModelState(spec, spec.pinned, SlidingRate(self.settings.rate_window_s))
            self.models[spec.name] = model
        old, model.spec, model.removed = model.spec, spec, False
        model.stillborn = 0
        self._clear_failure(model)
        if _loads_differently(old, spec):
            for instance in list(model.instances):
                self.stop(instance, because(ReasonCode.CATALOG), now_s)
        if spec.pinned != old.pinned:
            model.pinned = spec.pinned
        self._want_pinned(model)

    def _want_pinned(self, model: ModelState) -> None:
        if model.pinned and not model.coming_or_here:
            model.want = model.want or because(ReasonCode.PINNED)
            self._wanting[model.name] = None
            self._next_retry_s = float("-inf")

    def _catalog_changed(self, upserted: tuple[ModelSpec, ...], removed: tuple[ModelName, ...], now_s: float) -> None:
        for spec in upserted:
            self._upsert(spec, now_s)
            if self.models[spec.name].waiting:
                self.want(self.models[spec.name], now_s)
        for name in removed:
            if (model := self.models.get(name)) is not None:
                self._remove(model, now_s)
        self.catalog_changed(now_s)

    def _remove(self, model: ModelState, now_s: float) -> None:
        model.removed, model.want = True, None
        self._wanting.pop(model.name, None)
        self._failed.pop(model.name, None)
        self._refuse(model, because(ReasonCode.UNKNOWN_MODEL), None, now_s)
        if not model.instances:
            del self.models[model.name]
        for instance in list(model.instances):
            self.stop(instance, because(ReasonCode.CATALOG), now_s)

    def _pin_changed(self, name: ModelName, pinned: bool, now_s: float) -> None:
        if (model := self.models.get(name)) is not None:
            model.pinned = pinned
            self._want_pinned(model)

    def _operator_load(self, event: OperatorLoad, now_s: float) -> None:
        model = self.models.get(event.model)
        if model is None or model.removed:
            return
        model.stillborn = 0
        self._clear_failure(model)
        if event.instances > 1:
            self._operator_instances(model, event.instances, now_s)
            return
        model.want, model.wanted_devices = because(ReasonCode.OPERATOR), event.devices
        active = model.in_state(InstanceState.ACTIVE)
        if active and (not event.devices or active[0].devices == event.devices):
            model.want, model.wanted_devices = None, ()
        elif active and isinstance(room := self.find_room(model, now_s), Room):
            self.start(model, room, because(ReasonCode.OPERATOR), now_s, active[0].key)  # a migration by hand
        else:
            self.want(model, now_s)

    def _operator_instances(self, model: ModelState, instances: int, now_s: float) -> None:
        """As many as there is room for, all ordered at once, so that their weights can be sent together."""
        model.least_instances = instances
        model.want, model.wanted_devices = because(ReasonCode.OPERATOR), ()
        if not model.coming_or_here:
            self.want(model, now_s)  # the first may drive others out
        model.want = None if model.coming_or_here else model.want
        while model.coming_or_here and sum(i.state is not InstanceState.DRAINING for i in model.instances) < instances:
            room = self.find_room(model, now_s)
            if not isinstance(room, Room) or room.evict or self._holds(model, room):
                return
            self.start(model, room, because(ReasonCode.OPERATOR, instances=instances), now_s)

    @staticmethod
    def _holds(model: ModelState, room: Room) -> bool:
        return any(set(i.devices) & set(room.devices) for i in model.instances)

    def _operator_unload(self, event: OperatorUnload, now_s: float) -> None:
        if (model := self.models.get(event.model)) is None:
            return
        leaving = [i for i in model.instances if not event.devices or set(i.devices) & set(event.devices)]
        if len(leaving) == len(model.instances):
            model.pinned, model.want, model.least_instances = False, None, 1
            if not model.waiting:
                self._wanting.pop(model.name, None)
        for instance in leaving:
            self.stop(instance, because(ReasonCode.OPERATOR), now_s, event.carry)

    # --- devices that are to be empty ---

    def _operator_drain(self, event: OperatorDrain, now_s: float) -> None:
        known = [d for d in event.devices if d in self.fleet.devices]
        for id in known:  # all of them before anything looks for another place
            self.fleet.set_draining(id, event.on, event.carry)
        if not event.on:
            self._retry(now_s)
        elif known:
            self._vacate([d for d in self.fleet.devices.values() if d.draining], now_s)

    def _vacate(self, devices: list[DeviceState], now_s: float) -> None:
        """What is on these devices leaves for another place, what is idle only if there is room. Called again with
        every report of such a device: the other place may fail, be lost or be drained itself before it serves."""
        here = list({key: (i, d) for d in devices for key, i in d.instances.items()}.values())
        # What does not serve yet goes first: it may be the new place of what does. What is idle goes last: it takes no
        # room that what is in use needs.
        for instance, device in sorted(
            here, key=lambda pair: (pair[0].state is InstanceState.ACTIVE, not pair[0].busy)
        ):
            if instance.key in self.loaded:
                self._leave(instance, device, now_s)

    def _leave(self, instance: Instance, device: DeviceState, now_s: float) -> None:
        model, reason = self.models[instance.model], because(ReasonCode.DRAIN, device=device.spec.id)
        active, drains = instance.state is InstanceState.ACTIVE, instance.state is InstanceState.DRAINING
        if drains or (active and _has_successor(model, instance)):
            if drains and device.carries:
                self.stop(instance, reason, now_s, carry=True)
            return
        needed = not model.removed and (not active or instance.busy or model.pinned)
        moves = needed or (not model.removed and len(model.instances) == 1)
        if active and moves and model.failures < self.settings.activation_attempts and not model.failed_for_good:
            if needed and now_s < model.retry_at_s:
                return  # its new place failed: another one is tried in a moment
            room = self.find_room(model, now_s)
            if isinstance(room, Room) and not room.evict:
                self.start(model, room, reason, now_s, instance.key)
                return
        self.stop(instance, reason, now_s, device.carries)
        if needed and not model.coming_or_here:
            model.want = model.want or reason
            self.want(model, now_s)


def _has_successor(model: ModelState, instance: Instance) -> bool:
    """Whether another instance is on its way that takes its place."""
    return any(i.replaces == instance.key and i.state is not InstanceState.DRAINING for i in model.instances)


def _loads_differently(old: ModelSpec, new: ModelSpec) -> bool:
    """Whether what is loaded for ``old`` cannot serve as ``new``."""
    return (old.path, old.tp, old.weight_bytes, old.shape, old.context_tokens, old.engine_args) != (
        new.path,
        new.tp,
        new.weight_bytes,
        new.shape,
        new.context_tokens,
        new.engine_args,
    )
