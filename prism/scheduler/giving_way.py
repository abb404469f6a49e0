"""When a spare instance gives way to those beside it (not in the Prism paper, which gives every model one instance).

Every instance reads its weights for its own requests. Where bandwidth is short that is what its neighbours lack, and
one instance that runs all requests of its model is better for everybody, while it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prism.core.ids import DeviceId
from prism.core.reasons import ReasonCode, because
from prism.core.settings import Placement
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.decisions import StopInstance
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.replica_load import ReplicaLoad
from prism.scheduler.shortage import bearable_wait_s

_SHORT: Final = 1.0
"""Sum of the shares of the bandwidth above which engines slow each other down."""
_STEADY: Final = 1.5
"""What a burst that grows needs is not known yet: as long as so many times as many requests come as in the last minute
on average, its instances stay."""


class GivingWay:
    """Asked for instances whose load was just reported."""

    def __init__(self, books: Books, load: ReplicaLoad) -> None:
        self._books, self._load = books, load

    def is_due(self, model: ModelRecord, instance: InstanceRecord, now_s: float) -> bool:
        """Whether the instance, a spare one of a model for which no request has to wait, should leave, as more requests
        would be in time without it, and

        1. where it is tokens come too slowly for somebody's objective (reason enough where places do not go by
           expected goodput), or
        2. requests wait there for longer than they can bear, its own or its neighbours', and the others of its model
           have room for all that it runs. Devices hold requests back for those that answer
           (:mod:`prism.policy.promises`), so that not tokens show that bandwidth is short, but who waits for it.
        """
        if not instance.running or model.hot or not model.is_spare(instance):
            return False
        active = model.in_state(InstanceState.READY)
        if len(active) < len(model.instances) or len(active) <= model.least_instances:
            return False  # one comes or leaves, and the load is not known yet; or an operator asked for so many
        by_goodput = self._books.settings.placement is Placement.GOODPUT
        if any(self._books.times.is_slow(id, now_s) for id in instance.shards):  # 1
            return not by_goodput or self._more_are_met_without(model, active, instance, now_s)
        if not by_goodput or not self._is_room_elsewhere(model, active, now_s):  # 2
            return False
        return self._somebody_waits(instance, now_s) and self._more_are_met_without(model, active, instance, now_s)

    def order(self, instance: InstanceRecord, now_s: float) -> StopInstance:
        """It leaves, and no other comes there for some time."""
        for id in instance.shards:
            self._books.fleet.devices[id].contested_s = now_s
        load = max(self._books.fleet.load_of(id, now_s) for id in instance.shards)
        waiting = sum(late.waiting for id in instance.shards for late in self._late_on(id))
        return StopInstance(instance, because(ReasonCode.SCALE_IN, load=load, waiting=waiting))

    def _is_room_elsewhere(self, model: ModelRecord, active: Sequence[InstanceRecord], now_s: float) -> bool:
        steady = model.burst.per_s(now_s) <= _STEADY * model.rate.per_s(now_s)
        return steady and self._load.needed(model.name) < len(active)

    def _somebody_waits(self, instance: InstanceRecord, now_s: float) -> bool:
        """Where the instance is bandwidth is short, and requests have waited for too long."""
        return any(self._late_on(id) for id in instance.shards if self._books.fleet.load_of(id, now_s) > _SHORT)

    def _more_are_met_without(
        self, model: ModelRecord, active: Sequence[InstanceRecord], instance: InstanceRecord, now_s: float
    ) -> bool:
        """Those that its model's other instances get then counted: every one of them has an equal part of the requests
        and their KV."""
        fleet, times = self._books.fleet, self._books.times
        rate_per_s = max(model.burst.per_s(now_s), model.rate.per_s(now_s))
        kv_bytes = sum(max(fleet.devices[id].busy_kv.get(i.key, 0) for id in i.shards) for i in active)
        have, fewer = len(active), len(active) - 1
        with_it = without = 0.0
        for one in active:
            for id in one.shards:
                others = times.site_of(id).minus(model.name)
                with_it += others.plus(times.newcomer(model, id, rate_per_s / have, kv_bytes / have)).met_per_s
                if one is not instance:
                    others = others.plus(times.newcomer(model, id, rate_per_s / fewer, kv_bytes / fewer))
                without += others.met_per_s
        return without > with_it

    def _late_on(self, id: DeviceId) -> list[InstanceRecord]:
        """Those on the device whose requests, which stand in its queue, have waited for too long."""
        models = self._books.models
        return [
            one
            for one in self._books.fleet.devices[id].instances.values()
            if one.waiting
            and one.queue_device == id
            and one.model in models
            and one.waited_s >= bearable_wait_s(models[one.model].spec.slo_ttft_s)
        ]
