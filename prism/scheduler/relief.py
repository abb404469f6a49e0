"""Moving models away from devices on which tokens come too slowly for their objectives, as far as that lets more
requests meet them (:mod:`prism.policy.goodput`); two models change places where no single move helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from prism.core.ids import DeviceId
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState, PlannedDecision
from prism.policy.goodput import Neighbour, Relief, SharingModel, Site, best_relief
from prism.scheduler.books import Books
from prism.scheduler.decisions import Room, StartInstance
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
_STAYS_S, _STAYS_ACTIVATIONS = 5.0, 20.0
"""A model stays so long where it was loaded, or so many activation times if that is longer."""


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
        return [] if relief is None else self._starts(site.id, relief, now_s)

    def explain(self, now_s: float) -> Sequence[PlannedDecision]:
        """What would be done about every loaded instance if it were decided now."""
        moves = {m.model.name: m for m in self.moves(now_s, len(self._books.fleet.devices))}
        return [self._explain(i, moves.get(i.model)) for i in self._books.loaded.values()]

    def _explain(self, instance: InstanceRecord, move: StartInstance | None) -> PlannedDecision:
        here = instance.devices
        if move is not None and move.replaces == instance.key:
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
            could = sum(t.rate_per_s for t in site.tenants if t.bearable >= 1.0)
            missed = could - site.met_per_s
            if missed > _MISSES * could:
                found.append((-missed, id, site))
        return [site for _, _, site in sorted(found, key=lambda f: f[:2])[:_STRAINED_AT_ONCE]]

    def _places_to_look_at(self, device: DeviceId) -> list[Site]:
        fleet = self._books.fleet
        work = np.where(fleet.usable, fleet.work, np.inf)
        least = [int(i) for i in np.argsort(work, kind="stable")[: _LOOKED_AT + 1] if work[i] < np.inf]
        ids = [id for i in least if (id := fleet.board.specs[i].id) != device]
        return [self._books.times.site_of(id) for id in ids]

    def _neighbour(self, site: Site, now_s: float) -> Neighbour:
        movable = tuple(t for t in site.tenants if self._may_move(t, now_s))
        return Neighbour(site, self._books.fleet.headroom_bytes(site.id), movable)

    def _may_move(self, tenant: SharingModel, now_s: float) -> bool:
        """The only, serving instance of a model in use, on one device, that has been there long enough for its load to
        have paid."""
        model = self._books.models[tenant.model]
        if len(model.instances) != 1 or model.pinned or tenant.duty <= 0.0 or tenant.rate_per_s <= 0.0:
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

    # --- the moves ---

    def _starts(self, device: DeviceId, relief: Relief, now_s: float) -> list[StartInstance]:
        """Nothing, if the books do not let everybody in."""
        steps = [(relief.goes, relief.to)]
        if relief.comes is not None:
            steps.append((relief.comes, device))
        models = self._books.models
        if not all(self._fits(models[name], to, now_s) for name, to in steps):
            return []
        return [self._start(models[name], to, relief, now_s) for name, to in steps]

    def _start(self, model: ModelRecord, to: DeviceId, relief: Relief, now_s: float) -> StartInstance:
        (instance,) = model.instances
        source, rate_per_s = ",".join(instance.devices), model.rate.per_s(now_s)
        reason = because(
            ReasonCode.MIGRATION, source=source, gain=relief.gain, work=instance.work, rate_per_s=rate_per_s
        )
        room = Room.on((to,), (), self._places.kv_cap_bytes(model, (to,), now_s))
        return StartInstance(model, room, reason, instance.key)

    def _fits(self, model: ModelRecord, to: DeviceId, now_s: float) -> bool:
        fleet = self._books.fleet
        fits = fleet.fits_now(self._places.shard_of(model, now_s)) & self._places.allowed(model, now_s)
        return bool(fits[fleet.index[to]])
