"""Who may leave a device for a waiting model, and what that costs (Prism, section 6.2; ALGORITHMS section 2)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from prism.core.ids import DeviceId
from prism.core.reasons import ReasonCode
from prism.core.settings import Overload
from prism.core.views import InstanceState
from prism.policy.demand import is_idle_for_long
from prism.policy.eviction import EvictionCandidate, ranked, recovered_trust
from prism.scheduler.books import Books
from prism.scheduler.records import InstanceRecord, ModelRecord

_READY = InstanceState.READY
_BACK_S = 10.0
"""A model in use that had to leave an overloaded fleet is back after about this long."""
_SPARE_LASTS_S = 60.0
"""A replica is not missed for about this long: its model serves on."""
_HOT_SPARE_LASTS_S = 1.0
"""The same where requests of its model wait for longer than they can bear: all it serves would wait as well."""


class Pressing(IntEnum):
    """How far the search for room may go."""

    CAN_WAIT = 0
    """Only models idle beyond their threshold leave."""
    WOULD_BE_LATE = 1
    """Any idle model leaves."""
    STARVING = 2
    """Models in use leave too; their requests are carried over."""


class Leavers(NamedTuple):
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

    def __init__(self, books: Books) -> None:
        self._books = books

    def leavers(self, device: DeviceId, pressing: Pressing, now_s: float) -> Leavers:
        """Everybody on the device who may leave it now, ready to be chosen from."""
        found = self.on(device, pressing, now_s)
        order = ranked(found, self._books.settings.eviction)
        fleet = self._books.fleet
        frees_bytes = sum([c.frees_bytes for c in found])
        return Leavers(tuple(found), tuple(order), frees_bytes, fleet.room_on(fleet.index[device]))

    def on(self, device: DeviceId, pressing: Pressing, now_s: float) -> list[EvictionCandidate]:
        """Everybody on the device who may leave it now."""
        found: list[EvictionCandidate] = []
        books, stays_in_use = self._books, pressing is not Pressing.STARVING
        for instance in books.fleet.devices[device].instances.values():
            if (
                stays_in_use
                and instance.idle_since_s is None
                and instance.state is not InstanceState.DRAINING
                and instance.model not in books.several
                and instance.model not in books.turned_away
            ):
                continue  # as most are: no need to look closer
            candidate = self.candidate(device, instance, pressing, now_s)
            if candidate is not None:
                found.append(candidate)
        return found

    def candidate(
        self, device: DeviceId, instance: InstanceRecord, pressing: Pressing, now_s: float
    ) -> EvictionCandidate | None:
        """The instance as one that may leave ``device``, or None if it may not.

        1. On its way out already: may be counted on, if nothing runs there or the search may go as far as that.
        2. In use (and not a spare one of its model): only for a model that starves, or if its own is turned away
           (:mod:`prism.scheduler.triage`) for one that would be late.
        3. Pinned, waited for, or not used yet: never (:meth:`_may_leave`); a spare one may all the same.
        4. Idle for less than its threshold: not for a model that can wait, unless it is a spare one.
        """
        model = self._books.models[instance.model]
        leaving = instance.state is InstanceState.DRAINING
        spare = not leaving and len(model.instances) > 1 and instance.state is _READY and model.is_spare(instance)
        in_use = instance.busy if leaving else instance.idle_since_s is None and not spare
        away = instance.model in self._books.turned_away
        if in_use and pressing < (Pressing.WOULD_BE_LATE if away else Pressing.STARVING):  # 1, 2
            return None
        if not leaving and not spare and not self._may_leave(model, instance, in_use, now_s):  # 3
            return None
        idle_s = 0.0 if instance.idle_since_s is None else now_s - instance.idle_since_s
        if idle_s > 0.0 and not spare and model.idle_since_s is not None:
            idle_s = now_s - min(model.idle_since_s, now_s - idle_s)  # it may have come when its model was idle already
        can_wait = pressing is Pressing.CAN_WAIT and not leaving and not spare
        if can_wait and not self._is_idle_for_long(model, idle_s):  # 4
            return None
        spare_s = _HOT_SPARE_LASTS_S if model.hot else _SPARE_LASTS_S
        remaining_s = spare_s if spare else self._remaining_s(model, idle_s, now_s)
        return EvictionCandidate(
            key=instance.key,
            frees_bytes=self._books.fleet.frees_bytes(device, instance),
            idle_s=idle_s,
            slo_ttft_s=model.spec.slo_ttft_s,
            expected_remaining_s=remaining_s,
            activation_s=self._books.activation_s(model),
            in_use=in_use,
            requests=instance.running + instance.waiting if in_use or spare else 0,
            coming=self._coming(model, now_s) if in_use else 0.0,
            leaving=leaving,
            spare=spare,
        )

    def _coming(self, model: ModelRecord, now_s: float) -> float:
        if self._books.settings.overload is not Overload.MOST_SERVED:
            return 0.0
        return _BACK_S * self._books.rates.lately(model, now_s)

    def _remaining_s(self, model: ModelRecord, idle_s: float, now_s: float) -> float:
        """How much longer the model stays idle, on average, as far as that was right lately."""
        left_s = self._books.idle_left_s(model, idle_s)
        if model.idle_trust == 1.0:
            return left_s
        return left_s * recovered_trust(model.idle_trust, now_s - model.trusted_s)

    def _may_leave(self, model: ModelRecord, instance: InstanceRecord, in_use: bool, now_s: float) -> bool:
        """Not pinned, not waited for, has served; one in use has also been there for the least residency."""
        ahead = instance.reason.code is ReasonCode.PREWARM  # nobody waited for it
        if instance.state is not InstanceState.READY or model.pinned or model.waiting:
            return False
        if not instance.served and not ahead:
            return False
        return not in_use or now_s - instance.since_s >= self._books.settings.min_residency_s

    def _is_idle_for_long(self, model: ModelRecord, idle_s: float) -> bool:
        if (threshold_s := self._books.settings.idle_threshold_s) is not None:
            return idle_s >= threshold_s
        return is_idle_for_long(idle_s, self._books.activation_s(model), model.idle, self._books.rates.pool_idle)
