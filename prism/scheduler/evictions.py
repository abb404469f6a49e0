"""Who has to leave where, so that a model has room (Prism, section 6.2; ALGORITHMS section 2)."""

from __future__ import annotations

from dataclasses import dataclass

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.core.reasons import Reason, ReasonCode, because
from prism.policy.eviction import choose_from_ranked
from prism.policy.pressure import Mask, Shard, domain_of
from prism.scheduler.books import Books
from prism.scheduler.places import Places
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.survey import Survey
from prism.scheduler.victims import Leavers, Pressing, Victims

_DEVICES_LOOKED_AT = 24
"""Most devices whose models are weighed against each other for one eviction; the longest idle ones' devices first."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What has to leave one device, and what it costs."""

    device: DeviceId
    victims: tuple[InstanceRecord, ...]
    regret: float
    kvpr: float
    """Of the device afterwards."""


class Evictions:
    """Looks for the cheapest way to make room; changes nothing but ``survey``."""

    def __init__(self, books: Books, places: Places) -> None:
        self._books, self._places = books, places
        self._victims = Victims(books)

    def find_cheapest(
        self, model: ModelRecord, pressing: Pressing, now_s: float, survey: Survey
    ) -> list[Eviction] | None:
        """One eviction per shard, on devices of one domain, with the least regret (then the least pressure)."""
        fleet, tp = self._books.fleet, model.spec.tp
        shard = self._places.shard_of(model, now_s)
        allowed = self._places.allowed(model, now_s) & fleet.board.could_ever_fit(shard)
        options: dict[str, list[Eviction]] = {}
        for device in self._devices_to_look_at(pressing, allowed, tp):
            leavers = self._leavers(device, pressing, now_s, survey)
            eviction = self._on_device(device, model, shard, pressing, leavers)
            if eviction is not None:
                options.setdefault(domain_of(fleet.devices[device].spec), []).append(eviction)
        sets = [sorted(found, key=_cost)[:tp] for found in options.values() if len(found) >= tp]
        return min(sets, key=lambda chosen: [_cost(e) for e in reversed(chosen)], default=None)

    def _leavers(self, device: DeviceId, pressing: Pressing, now_s: float, survey: Survey) -> Leavers:
        known = survey.leavers.get((device, pressing))
        if known is None:
            known = survey.leavers[(device, pressing)] = self._victims.leavers(device, pressing, now_s)
        return known

    def _devices_to_look_at(self, pressing: Pressing, allowed: Mask, tp: int) -> list[DeviceId]:
        fleet = self._books.fleet
        if len(fleet.devices) <= _DEVICES_LOOKED_AT or tp > 1 or pressing is Pressing.STARVING:
            return [spec.id for spec, ok in zip(fleet.board.specs, allowed, strict=True) if ok]
        found: dict[DeviceId, None] = {}
        for instance in fleet.idle.values():
            if len(found) >= _DEVICES_LOOKED_AT:
                break
            found.update((d, None) for d in instance.shards if allowed[fleet.index[d]])
        return list(found)

    def _on_device(
        self, device: DeviceId, model: ModelRecord, shard: Shard, pressing: Pressing, leavers: Leavers
    ) -> Eviction | None:
        """What leaves ``device`` for a shard of ``model``.

        1. Everybody who may leave would not be enough: nothing.
        2. An instance of the model itself is there and stays, or is still busy on its way out: nothing.
        3. Its own instances that are on their way out go in any case (they must not stand there twice).
        4. Of the others, as few as are needed, by rank; at least one where the device has as many engines as it may.
        5. Memory that should have been there was not, and the model starves: everybody, if that should be enough.
        """
        fleet = self._books.fleet
        need_bytes = self._places.need_bytes(model, device, shard)
        if need_bytes > leavers.room_bytes + leavers.frees_bytes and device not in model.short_bytes:  # 1
            return None
        here = fleet.devices[device].instances
        forced = [c for c in leavers.candidates if c.key.model == model.name and c.leaving]
        if len(forced) < sum(i.model == model.name for i in here.values()):  # 2
            return None
        room_bytes = leavers.room_bytes + sum(c.frees_bytes for c in forced)  # 3
        others = [c for c in leavers.ranked if c.key.model != model.name]
        lacks_seat = fleet.board.seats[fleet.index[device]] + len(forced) < 1.0
        chosen = choose_from_ranked(others, max(int(need_bytes - room_bytes), int(lacks_seat)))  # 4
        if chosen is None and device in model.short_bytes and pressing is Pressing.STARVING:  # 5
            everybody = tuple(c for c in leavers.candidates if c.key.model != model.name)
            most_bytes = room_bytes + sum(c.frees_bytes for c in everybody)
            chosen = everybody if most_bytes >= fleet.board.need_on(fleet.index[device], shard) else None
        if chosen is None:
            return None
        victims = tuple(here[c.key] for c in (*forced, *chosen))
        return Eviction(device, victims, sum((c.regret for c in chosen), 0.0), self._kvpr_after(device, shard, victims))

    def _kvpr_after(self, device: DeviceId, shard: Shard, victims: tuple[InstanceRecord, ...]) -> float:
        board, index = self._books.fleet.board, self._books.fleet.index[device]
        gone = [v.shards[device] for v in victims]
        rate = board.rate[index] + shard.weighted_rate - sum(v.weighted_rate for v in gone)
        freed_bytes = sum(board.weights_bytes(index, v) for v in gone)
        left = board.shared[index] - board.weights_bytes(index, shard) + freed_bytes
        return float(rate / left) if left > 0 else float("inf")

    def reasons(
        self, evictions: list[Eviction], model: ModelRecord, now_s: float
    ) -> tuple[tuple[InstanceRecord, Reason], ...]:
        """Every victim once, with why it leaves."""
        victims: dict[InstanceKey, tuple[InstanceRecord, Reason]] = {}
        for eviction in evictions:
            for victim in eviction.victims:
                code = ReasonCode.MAKE_ROOM if victim.idle_since_s is not None else ReasonCode.STARVATION
                if len(self._books.active(victim.model)) > 1:
                    code = ReasonCode.SCALE_IN
                idle_s = 0.0 if victim.idle_since_s is None else now_s - victim.idle_since_s
                reason = because(code, for_model=model.name, idle_s=idle_s, regret=eviction.regret)
                victims[victim.key] = (victim, reason)
        return tuple(victims.values())

    def clearable_devices(self, model: ModelRecord, now_s: float) -> tuple[DeviceId, ...] | None:
        """Devices of one domain, one per shard, that could be cleared for the model: room enough beside what is pinned
        there. Those first on which the most could be had at once."""
        fleet, shard = self._books.fleet, self._places.shard_of(model, now_s)
        open_to = self._places.open_to(model) & fleet.board.could_ever_fit(shard)
        groups: dict[str, list[tuple[float, DeviceId]]] = {}
        for spec, is_open in zip(fleet.board.specs, open_to, strict=True):
            if is_open and self._could_be_cleared(spec.id, shard):
                now_bytes = sum(c.frees_bytes for c in self._victims.on(spec.id, Pressing.STARVING, now_s))
                group = groups.setdefault(domain_of(spec), [])
                group.append((-fleet.room_on(fleet.index[spec.id]) - now_bytes, spec.id))
        sets = [sorted(found)[: model.spec.tp] for found in groups.values() if len(found) >= model.spec.tp]
        best = min(sets, key=lambda chosen: (chosen[-1], chosen), default=None)
        return None if best is None else tuple(device for _, device in best)

    def _could_be_cleared(self, device: DeviceId, shard: Shard) -> bool:
        """Whether the shard has room, and its engine a seat, beside what is pinned on the device."""
        fleet, models = self._books.fleet, self._books.models
        goes = [i for i in fleet.devices[device].instances.values() if not models[i.model].pinned]
        goes_bytes, index = sum(fleet.frees_bytes(device, i) for i in goes), fleet.index[device]
        has_seat = fleet.board.seats[index] + len(goes) >= 1.0
        return bool(has_seat and fleet.room_on(index) + goes_bytes >= fleet.board.need_on(index, shard))


def _cost(eviction: Eviction) -> tuple[float, float, str]:
    return (eviction.regret, eviction.kvpr, eviction.device)
