"""Moving models away from devices on which tokens come too slowly or requests wait, by what everybody takes of a
device's bandwidth and memory (:mod:`prism.policy.work`); two models change places where no single move helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from prism.core.ids import DeviceId, ModelName
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState, PlannedDecision
from prism.policy.device_time import slowdown
from prism.policy.work import MovableModel, Neighbour, Relief, ShardDemand, Site, best_relief
from prism.scheduler.books import Books
from prism.scheduler.crowding import is_pressed
from prism.scheduler.decisions import Room, StartInstance
from prism.scheduler.places import Places
from prism.scheduler.records import InstanceRecord, ModelRecord

_LOOKED_AT: Final = 16
"""Most devices that are looked at as places, the least loaded ones."""
_LEAST_GAIN: Final = 0.2
"""Of the sum of loads: less is lost in what changes anyway."""
_STAYS_S, _STAYS_ACTIVATIONS = 5.0, 20.0
"""A model stays so long where it was loaded, or so many activation times if that is longer."""


_STRAINED_AT_ONCE: Final = 16
"""Most devices that are looked at to be relieved, the most loaded ones."""


class WorkRelief:
    """Looks for moves; remembers nothing."""

    def __init__(self, books: Books, places: Places) -> None:
        self._books, self._places = books, places

    def moves(self, now_s: float, budget: int) -> Iterator[StartInstance]:
        """Instances that take the place of others elsewhere, ``budget`` at most, for the fullest devices first."""
        for device in self._strained(now_s)[:_STRAINED_AT_ONCE]:
            if budget <= 0:
                return
            for start in self._relieve(device, now_s):
                yield start
                budget -= 1

    def _relieve(self, device: DeviceId, now_s: float) -> list[StartInstance]:
        """The best move or exchange for ``device``, if any pays: what a load costs is its share of the planning
        window."""
        tenants = self._tenants(device, now_s)
        if not tenants:
            return []
        settings, models = self._books.settings, self._books.models
        others = [self._neighbour(id, self._tenants(id, now_s)) for id in self._places_to_look_at(device)]
        needs = {t.model: self._need_bytes(t.model) for t in (*tenants, *(t for n in others for t in n.tenants))}
        load_s = max(self._books.activation_s(models[name]) for name in needs)
        price = _LEAST_GAIN + load_s / settings.planning_window_s
        relief = best_relief(self._neighbour(device, tenants), others, needs, price)
        return [] if relief is None else self._starts(device, relief, now_s)

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

    def _strained(self, now_s: float) -> list[DeviceId]:
        """Devices that are short of memory or time, or whose requests get their tokens too slowly for their objectives;
        the most loaded first."""
        fleet, share = self._books.fleet, self._books.settings.pressed_kv_share
        loads = fleet.loads(now_s)
        found = [
            id
            for id, index in fleet.index.items()
            if is_pressed(fleet, id, share) or slowdown(loads[index]) > self._books.times.bearable_slowdown(id)
        ]
        return sorted(found, key=lambda id: (-loads[fleet.index[id]], id))

    def _places_to_look_at(self, device: DeviceId) -> list[DeviceId]:
        fleet = self._books.fleet
        shared = np.maximum(fleet.board.shared, 1.0)
        loads = np.where(fleet.usable, fleet.work**2 + (fleet.kv_work / shared) ** 2, np.inf)
        order = np.argsort(loads, kind="stable")[: _LOOKED_AT + 1]
        ids = [fleet.board.specs[int(i)].id for i in order if loads[i] < np.inf]
        return [id for id in ids if id != device]

    def _neighbour(self, id: DeviceId, tenants: tuple[MovableModel, ...]) -> Neighbour:
        fleet = self._books.fleet
        index = fleet.index[id]
        site = Site(id, float(fleet.work[index]), float(fleet.kv_work[index]), float(fleet.board.shared[index]))
        return Neighbour(site, fleet.headroom_bytes(id), tenants)

    def _tenants(self, id: DeviceId, now_s: float) -> tuple[MovableModel, ...]:
        """Who may leave ``id``: the only, serving instance of a model in use, on one device, that has been there long
        enough for its load to have paid."""
        found: list[MovableModel] = []
        for instance in self._books.fleet.devices[id].instances.values():
            model = self._books.models[instance.model]
            alone = len(model.instances) == 1 and not model.pinned and len(instance.shards) == 1
            serves = instance.state is InstanceState.READY and instance.busy
            if alone and serves and self._has_paid(model, instance, now_s):
                demand = ShardDemand(instance.work, instance.kv_work_bytes, instance.shards[id].weight_bytes)
                found.append(MovableModel(model.name, demand))
        return tuple(found)

    def _has_paid(self, model: ModelRecord, instance: InstanceRecord, now_s: float) -> bool:
        """At most a twentieth of its time goes into moving."""
        stays_s = max(_STAYS_S, _STAYS_ACTIVATIONS * self._books.activation_s(model))
        return now_s - instance.since_s >= min(stays_s, self._books.settings.planning_window_s)

    def _need_bytes(self, name: ModelName) -> int:
        """Room that the model needs where it goes: weights, and KV as much as it has."""
        model = self._books.models[name]
        least_bytes = self._books.shard_kv_bytes(model.spec)
        return model.spec.shard_weight_bytes + max(least_bytes, int(model.instances[0].kv_work_bytes))

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
