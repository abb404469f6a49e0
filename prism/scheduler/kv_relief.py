"""Room for the KV of requests that wait for memory: idle neighbours leave, and what drains is carried over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prism.core.ids import DeviceId
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState
from prism.policy.eviction import EvictionCandidate, choose_evictions
from prism.policy.kv_room import KvTenant, outweighed
from prism.scheduler.books import Books
from prism.scheduler.crowding import requests_wait_for_memory
from prism.scheduler.decisions import StopInstance
from prism.scheduler.records import InstanceRecord
from prism.scheduler.victims import Pressing, Victims

_ACTIVATIONS_AWAY = 10.0
"""An idle model gives way to its neighbours' KV if it stays idle for so many activation times."""

_WAY_ACTIVATIONS = 2.0
"""What a model's way out and back costs, in activation times."""

_DRAINS_FOR_S = 0.25
"""A drain may take so long before it is hurried for neighbours that wait for memory: most answers are nearly done."""

_LASTING_ACTIVATIONS = 2.0
"""A shortage that has lasted for so many activation times is none that ends by itself."""


class KvRelief:
    """Decides on a device's report alone; remembers nothing."""

    def __init__(self, books: Books) -> None:
        self._books, self._victims = books, Victims(books)

    def on_shortage(self, device: DeviceId, here: Sequence[InstanceRecord], now_s: float) -> Iterator[StopInstance]:
        """Requests wait for memory on ``device``.

        1. What drains there is carried over, where that helps; nobody else leaves until it is gone.
        2. Else one leaves, so that the next report shows whether it was enough: a spare instance, whose model serves on
           elsewhere (not one that runs something while requests wait at most of its model's instances), or an idle
           model; never the one whose own requests are all that wait, which would only wait elsewhere. Its neighbours'
           KV takes its place at once, so that coming back is harder than going: a model goes only if it is likely to
           stay idle for many activations,
        3. unless nothing can run here at all: then any that is idle beyond its threshold, at once if it is not expected
           back within the time of two activations, else only if the requests have waited for longer than its way out
           and back would take.
        4. Else, when that has lasted, one in use that is outweighed by those that wait (:mod:`prism.policy.kv_room`),
           and nobody comes in its place for a while.
        """
        draining = [i for i in here if i.state is InstanceState.DRAINING]
        if draining:  # 1
            yield from (stop for i in draining if (stop := self._carry_over(i, now_s)) is not None)
            return
        here_now = self._books.fleet.devices[device]
        hungry = {i.key for i in here if i.waiting} or {i.key for i in here if i.running}
        found = [
            candidate
            for candidate in self._victims.on(device, Pressing.CAN_WAIT, now_s)
            if hungry != {candidate.key}
            and (
                (candidate.spare and not (candidate.requests and self._books.models[candidate.key.model].hot))
                or candidate.expected_remaining_s >= _ACTIVATIONS_AWAY * candidate.activation_s  # 2
                or (here_now.stalled and _is_worth_it(candidate, here_now.memory_short_s))  # 3
            )
        ]
        leaving = choose_evictions(found, 1, self._books.settings.eviction) or ()
        for candidate in leaving:
            code = ReasonCode.SCALE_IN if candidate.spare else ReasonCode.KV_PRESSURE
            reason = because(code, idle_s=candidate.idle_s, regret=candidate.regret)
            yield StopInstance(self._books.loaded[candidate.key], reason)
        if not leaving:  # 4
            yield from self._outweighed(device, here, now_s)

    def _outweighed(self, device: DeviceId, here: Sequence[InstanceRecord], now_s: float) -> Iterator[StopInstance]:
        books, there = self._books, self._books.fleet.devices[device]
        if not books.settings.global_scheduler:
            return
        tenants = [
            KvTenant(
                key=i.key,
                running=i.running,
                waiting=i.waiting,
                kv_bytes=there.busy_kv.get(i.key, 0),
                frees_bytes=books.fleet.frees_bytes(device, i),
                may_leave=self._may_give_way(i, there.memory_short_s, now_s),
            )
            for i in here
        ]
        if (found := outweighed(tenants)) is None:
            return
        victim = books.loaded[found.key]
        for id in victim.shards:
            books.fleet.keep_free(id, now_s)
        reason = because(
            ReasonCode.KV_PRESSURE, for_model=found.to.model, requests=victim.running + victim.waiting, more=found.more
        )
        yield StopInstance(victim, reason, carry=True)

    def _may_give_way(self, instance: InstanceRecord, short_s: float, now_s: float) -> bool:
        model = self._books.models[instance.model]
        if instance.state is not InstanceState.READY or model.pinned:
            return False
        lasting_s = _LASTING_ACTIVATIONS * self._books.activation_s(model)
        return short_s >= lasting_s and now_s - instance.since_s >= self._books.settings.min_residency_s

    def _carry_over(self, instance: InstanceRecord, now_s: float) -> StopInstance | None:
        """What a model still runs where it has moved away from, and where others wait for memory, goes on where it has
        moved to, unless memory is short there as well. Answers take seconds, and a page of KV, which many requests
        share, comes back with the last of them."""
        active = self._books.active(instance.model)
        drains_s = now_s - instance.since_s
        if not instance.busy or not active or drains_s < _DRAINS_FOR_S:
            return None
        if any(requests_wait_for_memory(self._books.fleet, d) for i in active for d in i.shards):
            return None
        return StopInstance(instance, because(ReasonCode.KV_PRESSURE, drains_s=drains_s), carry=True)


def _is_worth_it(candidate: EvictionCandidate, short_s: float) -> bool:
    """Whether nothing running here is worse than driving the model out although it may be back soon."""
    way_s = _WAY_ACTIVATIONS * candidate.activation_s
    return candidate.expected_remaining_s >= way_s or short_s >= way_s
