"""Devices on which idle instances leave for a further one of a model whose requests wait (not in the Prism paper, which
gives every model one instance).

Where most models of a catalog are idle, their weights take all memory that nobody needs: without this a burst would
stay on the instance that its model has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.policy.eviction import EvictionCandidate, choose_from_ranked
from prism.policy.pressure import Shard, domain_of
from prism.scheduler.books import Books
from prism.scheduler.crowding import is_pressed, requests_wait_for_memory
from prism.scheduler.gains import Further, Gains
from prism.scheduler.places import Places
from prism.scheduler.victims import Pressing, Victims

_DEVICES_LOOKED_AT: Final = 32
"""Most devices for each shard that are weighed against each other: those of the models that have been idle longest."""
_SPARE_STAYS_S: Final = 20.0
"""A spare instance does not leave for another model's spare one sooner."""
_OUTWEIGHED: Final = 4.0
"""So many requests must be late for each one that will miss who left, and for each device to which that has to come
back, as it drives out others there in turn."""
_ACTIVATIONS_AWAY: Final = 10.0
"""Who is not a spare instance leaves only if it is likely to stay idle for so many activation times."""
_STAYS_S: Final = 60.0
"""A further instance is believed to stay for so long; who is asked later is not missed."""


class Cleared(NamedTuple):
    """A place, and who leaves for it."""

    devices: tuple[DeviceId, ...]
    leave: tuple[InstanceKey, ...]


class _Option(NamedTuple):
    gain: float
    """Requests per second in time, those of who leaves counted as lost."""
    device: DeviceId
    leave: tuple[EvictionCandidate, ...]


class Clearing:
    """Looks for such places; changes nothing."""

    def __init__(self, books: Books, places: Places, gains: Gains) -> None:
        self._books, self._places, self._gains = books, places, gains
        self._victims = Victims(books)

    def places_for(self, one: Further, late: float, now_s: float) -> Iterator[Cleared]:
        """Places on devices of their own, those first on which most is gained; as all is when the first is asked for.
        ``late``: requests that will have their first tokens too late as it is.

        1. None is late: nobody leaves. Spare instances of two models that burst in turn would drive each other out.
        2. Spare instances without requests leave; the only instance of a model if it is idle beyond its threshold and
           likely to stay so, and as far as late requests outweigh what that costs.
        3. On each device those whose leaving costs least for the room they give (:mod:`prism.scheduler.victims`), until
           there is room for the instance with its share of the KV, beside what those who stay may need again.
        4. Not where requests wait for memory or time, or where something is being loaded: it may need that room.
        """
        if late <= 0.0:  # 1
            return
        tp, outweighs, gone = one.model.spec.tp, late / _OUTWEIGHED, set[InstanceKey]()
        groups: dict[str, list[_Option]] = {}
        for option in self._options(one, now_s):
            groups.setdefault(domain_of(self._books.fleet.devices[option.device].spec), []).append(option)
        for options in groups.values():
            options.sort(key=_order)
        while ready := [options for options in groups.values() if len(options) >= tp]:
            best = max(ready, key=lambda options: sum(option.gain for option in options[:tp]))
            chosen = best[:tp]
            del best[:tp]
            leave = {c.key: c for option in chosen for c in option.leave}
            missed = sum(_missed(c) * len(self._books.loaded[key].shards) for key, c in leave.items())
            # One that stands on several devices leaves for one instance only.
            if leave and gone.isdisjoint(leave) and missed <= outweighs:  # 2
                gone.update(leave)
                outweighs -= missed
                yield Cleared(tuple(option.device for option in chosen), tuple(leave))

    def _options(self, one: Further, now_s: float) -> Iterator[_Option]:
        model, board = one.model, self._books.fleet.board
        shard = self._places.with_kv(model, one.kv_bytes, now_s)
        allowed = self._places.allowed(model, now_s) & board.could_ever_fit(shard)
        own = {id for instance in model.instances for id in instance.shards}
        for id in self._devices(model.spec.tp):
            if id in own or not allowed[self._books.fleet.index[id]] or not self._is_quiet(id):
                continue
            leave = self._leaving(id, shard, now_s)
            if leave or (leave is not None and model.spec.tp > 1):
                before, after = self._gains.met_per_s(one, id, [c.key for c in leave])
                yield _Option(after - before, id, leave)

    def _devices(self, tp: int) -> list[DeviceId]:
        """Where somebody is idle, those first who have been for longest; with several shards all of their domains."""
        fleet, most = self._books.fleet, _DEVICES_LOOKED_AT * tp
        found: dict[DeviceId, None] = {}
        for instance in fleet.idle.values():
            if len(found) >= most:
                break
            found.update(dict.fromkeys(instance.shards))
        if tp == 1:
            return list(found)
        domains = {domain_of(fleet.devices[id].spec) for id in found}
        found.update((spec.id, None) for spec in fleet.board.specs if domain_of(spec) in domains)
        return list(found)

    def _is_quiet(self, id: DeviceId) -> bool:
        fleet, kv_share = self._books.fleet, self._books.settings.pressed_kv_share
        if requests_wait_for_memory(fleet, id) or is_pressed(fleet, id, kv_share):
            return False
        return not fleet.devices[id].expects_somebody

    def _leaving(self, id: DeviceId, shard: Shard, now_s: float) -> tuple[EvictionCandidate, ...] | None:
        """Those who leave for the shard; none where there is room, None where all who may leave do not free enough."""
        fleet, index = self._books.fleet, self._books.fleet.index[id]
        lacks_bytes = int(fleet.board.need_on(index, shard) - fleet.headroom_bytes(id))
        lacks_seat = bool(fleet.board.seats[index] < 1.0)
        ranked = self._victims.leavers(id, Pressing.CAN_WAIT, now_s).ranked
        return choose_from_ranked([c for c in ranked if self._may_leave(c, now_s)], max(lacks_bytes, int(lacks_seat)))

    def _may_leave(self, candidate: EvictionCandidate, now_s: float) -> bool:
        if candidate.leaving or candidate.in_use or candidate.requests:
            return False
        if candidate.spare:
            return now_s - self._books.loaded[candidate.key].since_s >= _SPARE_STAYS_S
        return candidate.expected_remaining_s >= _ACTIVATIONS_AWAY * candidate.activation_s


def _missed(leaves: EvictionCandidate) -> float:
    """Requests that are expected to find the instance gone."""
    return 0.0 if leaves.costs_nothing else -math.expm1(-_STAYS_S / max(leaves.expected_remaining_s, 1e-3))


def _order(option: _Option) -> tuple[float, float, DeviceId]:
    return -option.gain, sum(c.regret for c in option.leave), option.device
