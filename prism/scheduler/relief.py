"""Moving models away from devices on which tokens come too slowly for their objectives, as far as that lets more
requests meet them (:mod:`prism.policy.relief`); two models change places where no single move helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from prism.core.ids import DeviceId
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState, PlannedDecision
from prism.policy.goodput import SharingModel, Site
from prism.policy.relief import Neighbour, Relief, admitted_gain, best_in_turn, best_relief
from prism.scheduler.books import Books
from prism.scheduler.decisions import Room, StartInstance
from prism.scheduler.lately import lately_site
from prism.scheduler.places import Places
from prism.scheduler.records import InstanceRecord, ModelRecord

_LOOKED_AT: Final = 16
"""Most devices that are looked at as places, the least loaded ones."""
_STRAINED_AT_ONCE: Final = 16
"""Most devices that are looked at to be relieved, those first that miss most."""
_MISSES: Final = 0.02
"""Part of a device's requests that is expected to miss, from which on it is looked at."""
_LEAST_GAIN: Final = 0.05
"""Part of a device's requests that a move must save: less is lost in what changes anyway."""
_AMPLE_GAIN: Final = 0.25
"""The same where memory is ample, by what devices let in."""
_STAYS_S, _STAYS_ACTIVATIONS = 5.0, 20.0
"""A model stays so long where it was loaded, or so many activation times if that is longer."""
_AWAY_S, _AWAY_ACTIVATIONS = 4.0, 2.0
"""A model that leaves first in an exchange is away for so many activations, and so long for what it
runs, which is carried over."""
_FULL_AT_MOST: Final = 4
"""So many devices are looked at for an exchange without free room: where all are full that is every pair of models."""


class GoodputRelief:
    """Looks for moves; remembers nothing."""

    def __init__(self, books: Books, places: Places) -> None:
        self._books, self._places = books, places

    def moves(self, now_s: float, budget: int) -> Iterator[StartInstance]:
        """Instances that take the place of others elsewhere, ``budget`` at most, where most requests miss first. What
        an earlier one changes is not seen by a later one: each device takes part in one."""
        used: set[DeviceId] = set()
        for site in self._strained():
            if budget <= 0:
                return
            if site.id in used:
                continue
            for start in self._relieve(site, used, now_s):
                yield start
                used |= {site.id, *start.room.devices}
                budget -= 1

    def _relieve(self, site: Site, used: set[DeviceId], now_s: float) -> list[StartInstance]:
        """The best move or exchange for the device, if any pays: a load costs its share of the planning window."""
        here = self._neighbour(site, now_s)
        if not here.movable:
            return []
        settings, models = self._books.settings, self._books.models
        others = [self._neighbour(s, now_s) for s in self._places_to_look_at(site.id) if s.id not in used]
        needs = {t.model: self._need_bytes(t) for n in (here, *others) for t in n.movable}
        load_s = max(self._books.activation_s(models[name]) for name in needs)
        price = (_LEAST_GAIN + load_s / settings.planning_window_s) * sum(t.rate_per_s for t in site.tenants)
        relief = best_relief(here, others, needs, price)
        if relief is not None and self._places.all_have_room():
            relief = self._worth_it(site, relief)
            return [] if relief is None else self._starts(site.id, relief, now_s)
        if relief is None and settings.exchanges and settings.elastic_memory:
            relief = self._in_turn_as_of_now(site.id, [n.site.id for n in others[:_FULL_AT_MOST]], now_s)
        return [] if relief is None else self._starts(site.id, relief, now_s)

    def _worth_it(self, site: Site, relief: Relief) -> Relief | None:
        """With the gain that devices let in; None where that is little. Where memory is ample it matters for nothing
        else which model is where, and every move changes who is held back, for better or worse."""
        gain = admitted_gain(site, self._books.times.site_of(relief.to), relief)
        loads = 1 if relief.comes is None else 2
        least = loads * _AMPLE_GAIN * sum(t.rate_per_s for t in site.tenants)
        return replace(relief, gain=gain) if gain > least else None

    def _in_turn_as_of_now(self, id: DeviceId, others: Sequence[DeviceId], now_s: float) -> Relief | None:
        """The exchange without free room that pays, by what was asked lately: where every device is full it is who runs
        at the same time that counts, and that changes sooner than what is asked on average."""
        here, *there = [self._neighbour(lately_site(self._books, d), now_s, idle_too=True) for d in (id, *others)]
        settings, models = self._books.settings, self._books.models
        needs = {t.model: self._need_bytes(t) for n in (here, *there) for t in n.movable}
        if not here.movable or _missed_per_s(here.site) is None:
            return None
        load_s = max(self._books.activation_s(models[name]) for name in needs)
        price = (_LEAST_GAIN + load_s / settings.planning_window_s) * sum(t.rate_per_s for t in here.site.tenants)
        away_s = _AWAY_S + _AWAY_ACTIVATIONS * load_s
        rooms = {name: self._room_without(models[name]) for name in needs}
        return best_in_turn(here, there, needs, rooms, price, away_s / settings.planning_window_s)

    def explain(self, now_s: float) -> Sequence[PlannedDecision]:
        """What would be done about every loaded instance if it were decided now."""
        moves = {m.model.name: m for m in self.moves(now_s, len(self._books.fleet.devices))}
        return [self._explain(i, moves.get(i.model)) for i in self._books.loaded.values()]

    def _explain(self, instance: InstanceRecord, move: StartInstance | None) -> PlannedDecision:
        here = instance.devices
        if move is not None:
            return PlannedDecision(instance.model, "move", here, move.room.devices, move.reason)
        reason = because(ReasonCode.STAY, duty=instance.duty, work=instance.work, kv_bytes=instance.kv_work_bytes)
        return PlannedDecision(instance.model, "stay", here, here, reason)

    # --- what is looked at ---

    def _strained(self) -> list[Site]:
        """Devices where requests are expected to miss that would not alone, most of them first."""
        found: list[tuple[float, DeviceId, Site]] = []
        for id, device in self._books.fleet.devices.items():
            if len(device.instances) < 2:
                continue
            site = self._books.times.site_of(id)
            if (missed := _missed_per_s(site)) is not None:
                found.append((-missed, id, site))
        return [site for _, _, site in sorted(found, key=lambda f: f[:2])[:_STRAINED_AT_ONCE]]

    def _places_to_look_at(self, device: DeviceId) -> list[Site]:
        fleet = self._books.fleet
        work = np.where(fleet.usable, fleet.work, np.inf)
        least = [int(i) for i in np.argsort(work, kind="stable")[: _LOOKED_AT + 1] if work[i] < np.inf]
        ids = [id for i in least if (id := fleet.board.specs[i].id) != device]
        return [self._books.times.site_of(id) for id in ids]

    def _neighbour(self, site: Site, now_s: float, idle_too: bool = False) -> Neighbour:
        movable = tuple(t for t in site.tenants if (idle_too or _is_used(t)) and self._may_move(t, now_s))
        return Neighbour(site, self._books.fleet.headroom_bytes(site.id), movable)

    def _may_move(self, tenant: SharingModel, now_s: float) -> bool:
        """The only, serving instance of its model, on one device, that has been there long enough for its load to
        have paid."""
        model = self._books.models[tenant.model]
        if len(model.instances) != 1 or model.pinned:
            return False
        (instance,) = model.instances
        serves = instance.state is InstanceState.READY and len(instance.shards) == 1
        return serves and self._has_paid(model, instance, now_s)

    def _has_paid(self, model: ModelRecord, instance: InstanceRecord, now_s: float) -> bool:
        """At most a twentieth of its time goes into moving."""
        stays_s = max(_STAYS_S, _STAYS_ACTIVATIONS * self._books.activation_s(model))
        return now_s - instance.since_s >= min(stays_s, self._books.settings.planning_window_s)

    def _need_bytes(self, tenant: SharingModel) -> int:
        """Room that the model needs where it goes: weights, and KV as much as it has."""
        least_bytes = self._books.shard_kv_bytes(self._books.models[tenant.model].spec)
        return tenant.weight_bytes + max(least_bytes, int(tenant.kv_bytes))

    def _room_without(self, model: ModelRecord) -> float:
        """What its device has for others once the model has left it."""
        (instance,) = model.instances
        id, fleet = instance.queue_device, self._books.fleet
        return fleet.room_on(fleet.index[id]) + fleet.frees_bytes(id, instance)

    # --- the moves ---

    def _starts(self, device: DeviceId, relief: Relief, now_s: float) -> list[StartInstance]:
        """Nothing, if the books do not let everybody in."""
        models = self._books.models
        goes, comes = models[relief.goes], None if relief.comes is None else models[relief.comes]
        steps = [(goes, relief.to)] if comes is None else [(goes, relief.to), (comes, device)]
        if comes is not None and relief.away is not None:
            return self._in_turn(steps, relief, now_s)
        if not all(self._fits(model, to, now_s) for model, to in steps):
            return []
        return [self._start(model, Room.on((to,)), relief, now_s) for model, to in steps]

    def _in_turn(
        self, steps: Sequence[tuple[ModelRecord, DeviceId]], relief: Relief, now_s: float
    ) -> list[StartInstance]:
        """The one that is away leaves for the other's new instance, and comes when the other's old one has left."""
        if not all(self._may_go(model, to, now_s) for model, to in steps):
            return []
        (away, its), (other, there) = sorted(steps, key=lambda step: step[0].name != relief.away)
        (leaves,), (moves,) = away.instances, other.instances
        why = because(ReasonCode.EXCHANGE, for_model=other.name, to=its, gain=relief.gain)
        first = self._start(other, Room.on((there,), ((leaves, why),)), relief, now_s)
        second = self._start(away, Room.on((its,)), relief, now_s)
        return [first, replace(second, replaces=None, follows=moves.key)]

    def _start(self, model: ModelRecord, room: Room, relief: Relief, now_s: float) -> StartInstance:
        (instance,) = model.instances
        source, rate_per_s = ",".join(instance.devices), model.rate.per_s(now_s)
        reason = because(
            ReasonCode.MIGRATION, source=source, gain=relief.gain, work=instance.work, rate_per_s=rate_per_s
        )
        capped = replace(room, kv_cap_bytes=self._places.kv_cap_bytes(model, room.devices, now_s))
        return StartInstance(model, capped, reason, instance.key)

    def _fits(self, model: ModelRecord, to: DeviceId, now_s: float) -> bool:
        fleet = self._books.fleet
        fits = fleet.fits_now(self._places.shard_of(model, now_s)) & self._places.allowed(model, now_s)
        return bool(fits[fleet.index[to]])

    def _may_go(self, model: ModelRecord, to: DeviceId, now_s: float) -> bool:
        """There is room once somebody has left."""
        allowed = self._places.allowed(model, now_s)
        return bool(allowed[self._books.fleet.index[to]])


def _is_used(tenant: SharingModel) -> bool:
    return tenant.duty > 0.0 and tenant.rate_per_s > 0.0


def _missed_per_s(site: Site) -> float | None:
    """Requests that are expected to miss there and would not alone; None: hardly any."""
    could = sum(t.rate_per_s for t in site.tenants if t.bearable >= 1.0)
    missed = could - site.met_per_s
    return missed if missed > _MISSES * could else None
