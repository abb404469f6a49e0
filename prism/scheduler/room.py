"""Where a wanted model goes, and who has to leave for it (Prism, section 6.2; ALGORITHMS section 2).

Feasible devices first, by KV pressure. Otherwise idle models leave: those idle beyond the threshold at once, any idle
one when the waiting requests could not be on time otherwise, one in use only for a model that has waited for half of
its starvation bound. What leaves already is counted on first. Devices that others have claimed are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.settings import ClusterSettings
from prism.core.views import InstanceState
from prism.policy.demand import IdleIntervals
from prism.policy.eviction import choose_from_ranked
from prism.policy.pressure import Mask, Shard, least_kv_bytes
from prism.scheduler.claims import Claims
from prism.scheduler.fleet import Fleet, Instance, ModelState
from prism.scheduler.victims import Pressing, Victims

_DEVICES_LOOKED_AT = 24
"""Most devices whose models are weighed against each other for one eviction; the longest idle ones' devices first."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What has to leave one device, and what it costs."""

    device: DeviceId
    victims: tuple[Instance, ...]
    regret: float
    kvpr: float
    """Of the device afterwards."""


class RoomFinder:
    """Looks at the fleet; changes nothing."""

    def __init__(
        self,
        settings: ClusterSettings,
        fleet: Fleet,
        models: dict[ModelName, ModelState],
        pool_idle: IdleIntervals,
        claims: Claims,
    ) -> None:
        self._settings = settings
        self._claims = claims
        self._fleet = fleet
        self._models = models
        self.victims = Victims(settings, fleet, models, pool_idle)
        self._remembers = False
        self._full: set[tuple[Pressing, int, int, int]] = set()

    def remember(self, on: bool) -> None:
        """While on, what was found is kept: for many waiting models that are looked at at one time."""
        self.victims.remember(on)
        self._remembers = on
        self._full.clear()

    def forget(self) -> None:
        """Something has changed: an instance came or goes, or a device was claimed."""
        self.victims.forget()
        self._full.clear()

    def is_full(self, model: ModelState, pressing: Pressing) -> bool:
        """Whether another model of the same size has just found no room, with or without evictions."""
        return bool(self._full) and self._size(model, pressing) in self._full

    def found_full(self, model: ModelState, pressing: Pressing) -> None:
        """Neither :meth:`free` nor :meth:`by_eviction` has found anything."""
        if self._remembers and (size := self._size(model, pressing)) is not None:
            self._full.add(size)

    def _size(self, model: ModelState, pressing: Pressing) -> tuple[Pressing, int, int, int] | None:
        """What decides whether there is room; None for a model with instances, failures or a claim of its own, or with
        devices that it was asked to use."""
        if model.instances or model.avoid_until_s or model.short_bytes or model.wanted_devices:
            return None
        if self._claims and self._claims.of(model.name) is not None:
            return None
        spec = model.spec
        kv_bytes = least_kv_bytes(spec, self._settings.min_kv_tokens)
        return pressing, spec.tp, spec.shard_weight_bytes, kv_bytes

    def shard_of(self, model: ModelState, sharers: int = 1) -> Shard:
        """What one shard of one of ``sharers`` instances would put on a device now; a model that just woke counts with
        one request."""
        spec = model.spec
        at_least = 1.0 / (self._settings.rate_window_s * spec.slo_ttft_s)
        rate = max(model.weighted_rate, at_least) / sharers
        return Shard(rate / spec.tp, spec.shard_weight_bytes, least_kv_bytes(spec, self._settings.min_kv_tokens))

    def allowed(self, model: ModelState, now_s: float) -> Mask:
        """Devices that the model may use now: in service, among those the operator named, not claimed by another model,
        not failed just now."""
        mask = self.open_to(model)
        for device, until_s in model.avoid_until_s.items():
            if now_s < until_s and device in self._fleet.index:
                mask[self._fleet.index[device]] = False
        return mask

    def open_to(self, model: ModelState) -> Mask:
        """The same, failures aside."""
        mask = self._fleet.usable.copy()
        if self._claims:
            for device in self._claims.others(model.name):
                if device in self._fleet.index:  # it may just have been lost
                    mask[self._fleet.index[device]] = False
        if model.wanted_devices:
            wanted = {self._fleet.index[d] for d in model.wanted_devices if d in self._fleet.index}
            for index in range(len(mask)):
                mask[index] &= index in wanted
        return mask

    def never_fits(self, model: ModelState) -> Reason | None:
        """Why the model cannot be placed even on empty devices; None if it can."""
        shard, fleet = self.shard_of(model), self._fleet
        possible = fleet.board.could_ever_fit(shard)
        if any(int(possible[domain].sum()) >= model.spec.tp for domain in fleet.board.domains):
            return None
        return because(
            ReasonCode.NO_FEASIBLE_DEVICE,
            weight_bytes=shard.weight_bytes,
            min_kv_bytes=shard.min_kv_bytes,
            shards=model.spec.tp,
            largest_device_bytes=int(fleet.board.capacity.max()),
        )

    def free(self, model: ModelState, now_s: float, sharers: int = 1) -> tuple[tuple[DeviceId, ...], float] | None:
        """The feasible devices with the least pressure, without anybody leaving, and that pressure."""
        shard = self.shard_of(model, sharers)
        allowed = self._fleet.fits_now(shard) & self.allowed(model, now_s)
        for device in model.short_bytes:
            if (index := self._fleet.index.get(device)) is not None:
                allowed[index] &= self._need_bytes(model, device, shard) <= self._fleet.room_on(index)
        for instance in model.instances:  # a second instance (migration) goes elsewhere
            for device in instance.devices:
                if (index := self._fleet.index.get(device)) is not None:
                    allowed[index] = False
        best = self._fleet.board.best(shard, model.spec.tp, allowed, self._settings.kvpr)
        if best is None:
            return None
        ids = [self._fleet.board.specs[i].id for i in best[0]]
        if model.wanted_devices and set(ids) == set(model.wanted_devices):
            ids = list(model.wanted_devices)  # in the rank order that was asked for
        return tuple(ids), best[1]

    def pressing(self, model: ModelState, activation_s: float, now_s: float) -> Pressing:
        """Late is what would miss its deadline if the load began any later than now."""
        if model.waiting == 0:
            return Pressing.WOULD_BE_LATE if model.want is not None else Pressing.CAN_WAIT
        if now_s >= model.starves_at_s:
            return Pressing.STARVING
        latest_start_s = model.tightest_deadline_s - 2.0 * activation_s
        return Pressing.WOULD_BE_LATE if now_s >= latest_start_s else Pressing.CAN_WAIT

    def by_eviction(self, model: ModelState, pressing: Pressing, now_s: float) -> list[Eviction] | None:
        """One eviction per shard, on devices of one domain, with the least regret (then the least pressure)."""
        shard, tp = self.shard_of(model), model.spec.tp
        allowed = self.allowed(model, now_s) & self._fleet.board.could_ever_fit(shard)
        options: dict[str, list[Eviction]] = {}
        for device in self._devices_to_look_at(pressing, allowed, tp):
            eviction = self._on_device(device, model, shard, pressing, now_s)
            if eviction is not None:
                spec = self._fleet.devices[device].spec
                options.setdefault(spec.domain or f"node {spec.node}", []).append(eviction)
        sets = [sorted(found, key=_cost)[:tp] for found in options.values() if len(found) >= tp]
        return min(sets, key=lambda chosen: [_cost(e) for e in reversed(chosen)], default=None)

    def _devices_to_look_at(self, pressing: Pressing, allowed: Mask, tp: int) -> list[DeviceId]:
        fleet = self._fleet
        if len(fleet.devices) <= _DEVICES_LOOKED_AT or tp > 1 or pressing is Pressing.STARVING:
            return [spec.id for spec, ok in zip(fleet.board.specs, allowed, strict=True) if ok]
        found: dict[DeviceId, None] = {}
        for instance in fleet.idle.values():
            if len(found) >= _DEVICES_LOOKED_AT:
                break
            found.update((d, None) for d in instance.devices if allowed[fleet.index[d]])
        return list(found)

    def _on_device(
        self, device: DeviceId, model: ModelState, shard: Shard, pressing: Pressing, now_s: float
    ) -> Eviction | None:
        fleet, index = self._fleet, self._fleet.index[device]
        leavers = self.victims.leavers(device, pressing, now_s)
        need_bytes = self._need_bytes(model, device, shard)
        if need_bytes > leavers.room_bytes + leavers.frees_bytes and device not in model.short_bytes:
            return None
        candidates = leavers.candidates
        forced = [c for c in candidates if c.model == model.name and c.leaving]
        others = [c for c in leavers.ranked if c.model != model.name]
        if len(forced) < sum(i.model == model.name for i in fleet.devices[device].instances.values()):
            return None  # an instance of its own is there, or still busy on its way out
        room_bytes = leavers.room_bytes + sum(c.frees_bytes for c in forced)
        chosen = choose_from_ranked(others, int(need_bytes - room_bytes))
        if chosen is None and device in model.short_bytes and pressing is Pressing.STARVING:
            # Memory that should have been there was not: everybody leaves, if that should be enough.
            others = [c for c in candidates if c.model != model.name]
            most_bytes = room_bytes + sum(c.frees_bytes for c in others)
            chosen = tuple(others) if most_bytes >= fleet.board.need_on(index, shard) else None
        if chosen is None:
            return None
        victims = tuple(fleet.devices[device].instances[InstanceKey(c.model, c.generation)] for c in (*forced, *chosen))
        return Eviction(device, victims, sum(c.regret for c in chosen), self._kvpr_after(index, shard, victims))

    def _kvpr_after(self, index: int, shard: Shard, victims: tuple[Instance, ...]) -> float:
        board = self._fleet.board
        rate = board.rate[index] + shard.weighted_rate - sum(v.shard.weighted_rate for v in victims)
        freed_bytes = sum(board.weights_bytes(index, v.shard) for v in victims)
        left = board.shared[index] - board.weights_bytes(index, shard) + freed_bytes
        return float(rate / left) if left > 0 else float("inf")

    def _need_bytes(self, model: ModelState, device: DeviceId, shard: Shard) -> int:
        """Weights, least KV, and what turned out to be missing there lately."""
        need_bytes = self._fleet.board.need_on(self._fleet.index[device], shard)
        return need_bytes + model.short_bytes.get(device, 0)

    # --- claims ---

    def clearable(self, model: ModelState, now_s: float) -> tuple[DeviceId, ...] | None:
        """Devices of one domain, one per shard, that could be cleared for the model: room enough beside what is pinned
        there. Those first on which the most could be had at once."""
        shard, fleet = self.shard_of(model), self._fleet
        open_to = self.open_to(model) & fleet.board.could_ever_fit(shard)
        groups: dict[str, list[tuple[float, DeviceId]]] = {}
        for spec, is_open in zip(fleet.board.specs, open_to, strict=True):
            if not is_open:
                continue
            index = fleet.index[spec.id]
            instances = fleet.devices[spec.id].instances.values()
            goes_bytes = sum(fleet.frees_bytes(spec.id, i) for i in instances if not self._models[i.model].pinned)
            if fleet.room_on(index) + goes_bytes >= fleet.board.need_on(index, shard):
                now_bytes = sum(c.frees_bytes for c in self.victims.on(spec.id, Pressing.STARVING, now_s))
                group = groups.setdefault(spec.domain or f"node {spec.node}", [])
                group.append((-fleet.room_on(index) - now_bytes, spec.id))
        sets = [sorted(found)[: model.spec.tp] for found in groups.values() if len(found) >= model.spec.tp]
        best = min(sets, key=lambda chosen: (chosen[-1], chosen), default=None)
        return None if best is None else tuple(device for _, device in best)


def eviction_reasons(
    evictions: list[Eviction], model: ModelState, models: dict[ModelName, ModelState], now_s: float
) -> tuple[tuple[Instance, Reason], ...]:
    """Every victim once, with why it leaves."""
    victims: dict[InstanceKey, tuple[Instance, Reason]] = {}
    for eviction in evictions:
        for victim in eviction.victims:
            code = ReasonCode.MAKE_ROOM if victim.idle_since_s is not None else ReasonCode.STARVATION
            if len(models[victim.model].in_state(InstanceState.ACTIVE)) > 1:
                code = ReasonCode.SCALE_IN
            idle_s = 0.0 if victim.idle_since_s is None else now_s - victim.idle_since_s
            reason = because(code, for_model=model.name, idle_s=idle_s, regret=eviction.regret)
            victims[victim.key] = (victim, reason)
    return tuple(victims.values())


def _cost(eviction: Eviction) -> tuple[float, float, str]:
    return (eviction.regret, eviction.kvpr, eviction.device)
