"""Who may leave a device for a waiting model, and what that costs (Prism, section 6.2; ALGORITHMS section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from prism.core.ids import DeviceId, ModelName
from prism.core.settings import ClusterSettings
from prism.core.views import InstanceState
from prism.policy.demand import IdleIntervals, expected_remaining_s, idle_threshold_s
from prism.policy.eviction import EvictionCandidate, ranked
from prism.scheduler.fleet import Fleet, Instance, ModelState

_SPARE_LASTS_S = 60.0
"""A replica is not missed for about this long: its model serves on."""


class Pressing(IntEnum):
    """How far the search for room may go."""

    CAN_WAIT = 0
    """Only models idle beyond their threshold leave."""
    WOULD_BE_LATE = 1
    """Any idle model leaves."""
    STARVING = 2
    """Models in use leave too; their requests are carried over."""


@dataclass(frozen=True, slots=True)
class Leavers:
    """Everybody who may leave one device, as things stand."""

    candidates: tuple[EvictionCandidate, ...]
    """As they stand on the device."""
    ranked: tuple[EvictionCandidate, ...]
    """In the order in which they should go."""
    frees_bytes: int
    """Of all together."""
    room_bytes: float
    """What the device has without anybody leaving."""


class Victims:
    """Looks at instances; changes nothing."""

    def __init__(
        self, settings: ClusterSettings, fleet: Fleet, models: dict[ModelName, ModelState], pool_idle: IdleIntervals
    ) -> None:
        self._settings, self._fleet, self._models, self._pool_idle = settings, fleet, models, pool_idle
        self._remembers = False
        self._known: dict[tuple[DeviceId, Pressing], Leavers] = {}

    def remember(self, on: bool) -> None:
        """While on, answers of :meth:`leavers` are kept: for many waiting models that look at the same devices at one
        time. Whoever lets an instance come or go calls :meth:`forget`."""
        self._remembers = on
        self._known.clear()

    def forget(self) -> None:
        """Something has changed."""
        self._known.clear()

    def leavers(self, device: DeviceId, pressing: Pressing, now_s: float) -> Leavers:
        """Everybody on the device who may leave it now, ready to be chosen from."""
        known = self._known.get((device, pressing))
        if known is None:
            found = self.on(device, pressing, now_s)
            order = ranked(found, self._settings.eviction)
            frees_bytes = sum([c.frees_bytes for c in found])
            known = Leavers(tuple(found), tuple(order), frees_bytes, self._fleet.room_on(self._fleet.index[device]))
            if self._remembers:
                self._known[(device, pressing)] = known
        return known

    def on(self, device: DeviceId, pressing: Pressing, now_s: float) -> list[EvictionCandidate]:
        """Everybody on the device who may leave it now."""
        found: list[EvictionCandidate] = []
        for instance in self._fleet.devices[device].instances.values():
            in_use = instance.idle_since_s is None and instance.state is not InstanceState.DRAINING
            if in_use and pressing is not Pressing.STARVING and len(self._models[instance.model].instances) < 2:
                continue  # as most are: no need to look closer
            candidate = self.candidate(device, instance, pressing, now_s)
            if candidate is not None:
                found.append(candidate)
        return found

    def candidate(
        self, device: DeviceId, instance: Instance, pressing: Pressing, now_s: float
    ) -> EvictionCandidate | None:
        """The instance as one that may leave ``device``, or None if it may not."""
        model = self._models[instance.model]
        leaving = instance.state is InstanceState.DRAINING
        spare = not leaving and len(model.instances) > 1 and self._is_spare(model, pressing)
        in_use = instance.busy if leaving else instance.idle_since_s is None and not spare
        if in_use and pressing < Pressing.STARVING:
            return None
        if not leaving and not self._may_leave(model, instance, in_use, now_s):
            return None
        idle_s = 0.0 if instance.idle_since_s is None else now_s - instance.idle_since_s
        activation_s = model.activation_s if model.activation_s is not None else self._settings.activation_guess_s
        if pressing is Pressing.CAN_WAIT and not leaving and idle_s < self._threshold_s(model, activation_s):
            return None
        return EvictionCandidate(
            model=instance.model,
            generation=instance.generation,
            frees_bytes=self._fleet.frees_bytes(device, instance),
            idle_s=idle_s,
            slo_ttft_s=model.spec.slo_ttft_s,
            expected_remaining_s=_SPARE_LASTS_S if spare else expected_remaining_s(idle_s, model.idle, self._pool_idle),
            activation_s=activation_s,
            in_use=in_use,
            requests=instance.running + instance.waiting if in_use else 0,
            leaving=leaving,
        )

    def _may_leave(self, model: ModelState, instance: Instance, in_use: bool, now_s: float) -> bool:
        """Not pinned, not waited for, has served; one in use has also been there for the least residency."""
        if instance.state is not InstanceState.ACTIVE or model.pinned or model.waiting or not instance.served:
            return False
        return not in_use or now_s - instance.since_s >= self._settings.min_residency_s

    def _is_spare(self, model: ModelState, pressing: Pressing) -> bool:
        """The model serves on without one of its instances."""
        return pressing is not Pressing.CAN_WAIT and len(model.in_state(InstanceState.ACTIVE)) > 1

    def _threshold_s(self, model: ModelState, activation_s: float) -> float:
        if self._settings.idle_threshold_s is not None:
            return self._settings.idle_threshold_s
        return idle_threshold_s(activation_s, model.idle, self._pool_idle)
