"""Devices that are to be empty."""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.events import OperatorDrain
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import Room, StartInstance
from prism.scheduler.lifecycle import Lifecycle
from prism.scheduler.records import DeviceRecord, InstanceRecord, ModelRecord
from prism.scheduler.survey import Survey
from prism.scheduler.wanting import Wanting


class Drains:
    """Empties devices. Which they are stands in their records; what is on them says whether it is done."""

    def __init__(self, books: Books, lifecycle: Lifecycle, wanting: Wanting, policy: ClusterPolicy) -> None:
        self._books, self._lifecycle, self._wanting, self._policy = books, lifecycle, wanting, policy

    def on_operator_drain(self, event: OperatorDrain, now_s: float) -> None:
        """Devices leave service, or come back."""
        fleet = self._books.fleet
        known = [d for d in event.devices if d in fleet.devices]
        for id in known:  # all of them before anything looks for another place
            fleet.set_draining(id, event.on, event.carry)
        if not event.on:
            self._wanting.retry_wanted(now_s)
        elif known:
            self._vacate([d for d in fleet.devices.values() if d.draining], now_s)

    def on_report(self, device: DeviceRecord, now_s: float) -> None:
        """A device reported. Another place may fail, be lost or be drained itself before it serves: until nothing is on
        the device, it is looked at with every report."""
        if device.draining and device.instances:
            self._vacate([device], now_s)

    def _vacate(self, devices: Iterable[DeviceRecord], now_s: float) -> None:
        """What is on these devices leaves for another place, what is idle only if there is room."""
        here = list({key: (i, d) for d in devices for key, i in d.instances.items()}.values())
        # What does not serve yet goes first: it may be the new place of what does. What is idle goes last: it takes no
        # room that what is in use needs.
        for instance, device in sorted(here, key=lambda at: (at[0].state is InstanceState.READY, not at[0].busy)):
            if instance.key in self._books.loaded:
                self._move_away(instance, device, now_s)

    def _move_away(self, instance: InstanceRecord, device: DeviceRecord, now_s: float) -> None:
        """One instance leaves ``device``.

        1. It leaves already, or what takes its place is on its way: wait; carry over what drains if that was asked for.
        2. In use, or its model's only instance, and its model loads without failures: started elsewhere in free room
           first; when it is needed and a new place has just failed, in a moment.
        3. Else it goes; if it was needed its model is wanted, wherever there will be room.
        """
        model, reason = self._books.models[instance.model], because(ReasonCode.DRAIN, device=device.spec.id)
        active, drains = instance.state is InstanceState.READY, instance.state is InstanceState.DRAINING
        if drains or (active and _has_successor(model, instance)):  # 1
            if drains and device.carries:
                self._lifecycle.stop_instance(instance, reason, now_s, carry=True)
            return
        needed = not model.removed and (not active or instance.busy or model.pinned)
        attempts = self._books.settings.activation_attempts
        moves = needed or (not model.removed and len(model.instances) == 1)
        if active and moves and model.failures < attempts and not model.failed_for_good:  # 2
            if needed and now_s < model.retry_at_s:
                return
            room = self._policy.find_room(model, now_s, Survey())
            if isinstance(room, Room) and not room.evict:
                self._lifecycle.start_instance(StartInstance(model, room, reason, instance.key), now_s)
                return
        self._lifecycle.stop_instance(instance, reason, now_s, device.carries)  # 3
        self._wanting.retry_freed(now_s)
        if needed and not model.coming_or_here:
            self._wanting.want_because(model, reason, now_s)


def _has_successor(model: ModelRecord, instance: InstanceRecord) -> bool:
    """Whether another instance is on its way that takes its place."""
    return any(i.replaces == instance.key and i.state is not InstanceState.DRAINING for i in model.instances)
