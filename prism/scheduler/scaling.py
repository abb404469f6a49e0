"""More or fewer instances of one model: how many, and where.

:func:`decide_scaling` is the rule: a view in, a decision out, which may name any number of instances. Further instances
are made in free memory, for requests that would not be in time otherwise also in that of idle models
(:mod:`prism.scheduler.clearing`), and are the first to leave when anybody needs it. :class:`Scaling` asks the rule when
loads are reported, for as many instances as they need at once, and, when time passes, for those that a model's bursts
have needed and that stand ready for the next one: these cost nobody an eviction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.views import InstanceState, PlannedDecision
from prism.policy.device_time import slowdown
from prism.scheduler.books import Books
from prism.scheduler.clearing import Clearing
from prism.scheduler.crowding import is_pressed
from prism.scheduler.decisions import Decision, Room, StartInstance, StopInstance
from prism.scheduler.gains import Further, Gains
from prism.scheduler.giving_way import GivingWay
from prism.scheduler.live_ways import BegunWay, LiveWays
from prism.scheduler.places import Places
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.replica_load import ReplicaLoad

_STANDING_SETTLED_S: Final = 60.0
"""A device is no place for an instance that only stands ready when somebody had to leave it, or lacked memory there, so
short a time ago."""
_URGENT_SETTLED_S: Final = 20.0
"""The same for one that requests wait for."""
_DEVICES_A_ROUND: Final = 4
"""In one rebalancing one device of so many gets an instance that only stands ready."""
_URGENT_KV: Final = 0.5
"""Part of an instance's share of the KV for which a place must have room where requests wait for it: on a full fleet
one that takes half a share serves sooner than none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one further instance would stand."""

    devices: tuple[DeviceId, ...]
    slowdown: float
    """How many times longer than alone steps take there with the instance loaded as its model's busiest one is."""
    bearable: bool
    """All who run there would make their tokens within their objectives all the same."""
    pressed: bool
    """Short of memory or time already."""
    pays: bool = True
    """More requests meet their objectives with it than without, those of its neighbours counted."""
    evict: tuple[InstanceKey, ...] = ()
    """Idle instances of other models that leave for it."""


@dataclass(frozen=True, slots=True)
class ScalingView:
    """One model whose load was reported, at one moment."""

    wanted: int
    """Instances that its load, its bursts or an operator ask for."""
    active: tuple[tuple[InstanceKey, int], ...]
    """Those that serve, with their requests."""
    coming: int
    """Those that are on their way."""
    leaving: int
    may_grow: bool
    """No failure holds it back."""
    slowdown: float
    """How many times longer than alone steps take where it is slowed down most."""
    hot: bool
    """Requests wait for longer than they can bear; else tokens come too slowly, or nothing is wrong."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What to add and to remove, each instance by name; nothing at all most of the time."""

    add: tuple[Place, ...] = ()
    """One instance on each."""
    remove: tuple[InstanceKey, ...] = ()


def decide_scaling(view: ScalingView, places: Iterator[Place]) -> ScalingDecision:
    """How many instances come or go, and where. ``places``: the best one for a further instance, then for one more
    beside it, and so on.

    1. Fewer than wanted: all that are missing at once, those that come counted, as far as there are places that
       are not short of anything themselves, where neighbours lose no more than is gained, and where everybody's tokens
       stay within their objectives; when requests wait, a place that is less crowded than here will do. Weights of
       idle models slow nobody down and do not count.
    2. More than wanted: one leaves, the least loaded, of equal ones the youngest, unless one comes or leaves: the load
       is not known yet then.
    """
    have = len(view.active)
    if view.wanted > have:  # 1
        add: list[Place] = []
        lacking = view.wanted - have - view.coming
        while view.may_grow and len(add) < lacking and (place := next(places, None)) is not None:
            if place.pays and not place.pressed and (place.bearable or (view.hot and place.slowdown < view.slowdown)):
                add.append(place)
        return ScalingDecision(add=tuple(add))
    if view.coming or view.leaving:  # 2
        return ScalingDecision()
    by_load = sorted(view.active, key=lambda one: (one[1], -one[0].generation))
    return ScalingDecision(remove=tuple(key for key, _ in by_load[: min(1, have - view.wanted)]))


class Scaling:
    """Makes views of the books, and orders of decisions. Owns what is remembered of loads."""

    def __init__(self, books: Books, places: Places) -> None:
        self._books, self._places = books, places
        self._load, self._ways = ReplicaLoad(books), LiveWays(books)
        self._giving_way, self._gains = GivingWay(books, self._load), Gains(books, self._load)
        self._clearing = Clearing(books, places, self._gains)

    def explain(self) -> Iterator[PlannedDecision]:
        """In which way further instances come."""
        return self._ways.explain()

    def on_report(self, instance: InstanceRecord, now_s: float) -> Iterable[Decision]:
        """The load of the instance, which serves, was reported."""
        model = self._books.models[instance.model]
        active = model.in_state(InstanceState.READY)
        needed, have = self._load.observe(model, active, now_s), len(active)
        if have > 1 and self._giving_way.is_due(model, instance, now_s):
            return [self._giving_way.order(instance, now_s)]
        if needed > have:
            return self._grow(model, active, needed, ReasonCode.SCALE_OUT, now_s)
        if needed == have:
            return ()
        kept = max(needed, self._standing(model, now_s), min(model.least_instances, have))
        return self._shrink(model, active, kept, now_s) if kept < have else ()

    def on_time(self, now_s: float) -> Iterator[Decision]:
        """Rates are fresh: instances for bursts to come are made where memory is free, those first of which a byte of
        weights takes the most of the load."""
        self._load.forget_gone()
        lacking = [m for m in map(self._books.models.__getitem__, self._load.bursting()) if self._lacks(m, now_s)]
        budget = max(1, len(self._books.fleet.devices) // _DEVICES_A_ROUND)
        for model in sorted(lacking, key=lambda m: (-self._standing(m, now_s) / m.spec.weight_bytes, m.name)):
            active = model.in_state(InstanceState.READY)
            wanted = min(self._standing(model, now_s), len(active) + budget)
            for decision in self._grow(model, active, wanted, ReasonCode.STANDING, now_s):
                yield decision
                budget -= 1
            if budget <= 0:
                return

    def _standing(self, model: ModelRecord, now_s: float) -> int:
        """Instances that the model keeps where memory is free."""
        return self._load.peak(model.name, now_s) if self._books.settings.standing_replicas else 1

    def _lacks(self, model: ModelRecord, now_s: float) -> bool:
        serving = len(model.in_state(InstanceState.READY))
        return not model.removed and 0 < serving < self._standing(model, now_s)

    # --- growing ---

    def _grow(
        self, model: ModelRecord, active: list[InstanceRecord], wanted: int, code: ReasonCode, now_s: float
    ) -> Iterator[StartInstance]:
        busiest = max(active, key=lambda i: (i.running, i.key))
        view = ScalingView(
            wanted=wanted,
            active=tuple((i.key, i.running + i.waiting) for i in active),
            coming=len(model.in_state(InstanceState.WAITING, InstanceState.LOADING)),
            leaving=0,
            may_grow=now_s >= model.retry_at_s,
            slowdown=max(slowdown(self._books.fleet.load_of(d, now_s)) for i in active for d in i.shards),
            hot=model.hot,
        )
        crowded_from = view.slowdown if view.hot else 0.0
        places = decide_scaling(view, self._further_places(model, busiest, wanted, code, crowded_from, now_s)).add
        begun = self._begun(model, places, wanted, code, now_s)
        counts = {"instances": len(active), "wanted": wanted, "waiting": sum(i.waiting for i in active)}
        for place, live in zip(places, begun.modes, strict=True):
            reason = because(code, **counts, slowdown=place.slowdown, **begun.numbers)
            yield self._start(model, place, reason, live, now_s)

    def _begun(
        self, model: ModelRecord, places: Sequence[Place], wanted: int, code: ReasonCode, now_s: float
    ) -> BegunWay:
        """Instances that only stand ready, or that shall make tokens come faster, come as a whole: nothing waits."""
        if code is not ReasonCode.SCALE_OUT or not model.hot:
            return BegunWay((None,) * len(places), {})
        served_per_s = self._load.served_per_s(model.name, now_s)
        return self._ways.choose(model, [p.devices for p in places], wanted, served_per_s, now_s)

    def _start(
        self, model: ModelRecord, place: Place, reason: Reason, live: LiveMode | None, now_s: float
    ) -> StartInstance:
        evict = tuple((leaves := self._books.loaded[key], self._why(leaves, model, now_s)) for key in place.evict)
        room = Room.on(place.devices, evict, self._places.kv_cap_bytes(model, place.devices, now_s))
        return StartInstance(model, room, reason, live=live)

    def _why(self, leaves: InstanceRecord, model: ModelRecord, now_s: float) -> Reason:
        """``leaves`` goes for a further instance of ``model``."""
        code = ReasonCode.SCALE_IN if len(self._books.active(leaves.model)) > 1 else ReasonCode.MAKE_ROOM
        idle_s = 0.0 if leaves.idle_since_s is None else now_s - leaves.idle_since_s
        return because(code, for_model=model.name, idle_s=idle_s)

    def _further_places(
        self,
        model: ModelRecord,
        busiest: InstanceRecord,
        wanted: int,
        code: ReasonCode,
        crowded_from: float,
        now_s: float,
    ) -> Iterator[Place]:
        """Free room first, then, for requests that will be late, that of who is idle. ``crowded_from``: as
        :meth:`_place` has it."""
        one, urgent = self._gains.further(model, wanted, now_s), code is ReasonCode.SCALE_OUT
        kv_bytes = int((_URGENT_KV if urgent else 1.0) * one.kv_bytes)
        settled_s = _URGENT_SETTLED_S if urgent else _STANDING_SETTLED_S
        taken: set[DeviceId] = set()
        for devices in self._places.quiet(model, kv_bytes, settled_s, now_s):
            taken.update(devices)
            yield self._place(one, devices, busiest, crowded_from, now_s)
        if urgent:
            for devices, leave in self._clearing.places_for(one, self._load.late(model, now_s), now_s):
                if taken.isdisjoint(devices):
                    yield self._place(one, devices, busiest, crowded_from, now_s, leave)

    def _place(
        self,
        one: Further,
        devices: tuple[DeviceId, ...],
        busiest: InstanceRecord,
        crowded_from: float,
        now_s: float,
        leave: tuple[InstanceKey, ...] = (),
    ) -> Place:
        """One of ``devices``, which are not looked at closely where nobody's tokens stay within their objectives and
        steps take ``crowded_from`` times as long as alone, or longer: no instance comes there."""
        fleet, times, kv_share = self._books.fleet, self._books.times, self._books.settings.pressed_kv_share
        there = [times.crowd_with(d, busiest, now_s) for d in devices]
        bearable = all(s <= times.bearable_slowdown(d) for s, d in zip(there, devices, strict=True))
        pressed = any(is_pressed(fleet, d, kv_share) for d in devices)
        # No instance comes to a pressed place, so that what it would bring there, the dearest question, is not asked.
        may_come = not pressed and (bearable or max(there) < crowded_from)
        pays = may_come and self._gains.pays(one, devices, leave)
        return Place(devices, max(there), bearable, pressed, pays, leave)

    # --- shrinking ---

    def _shrink(
        self, model: ModelRecord, active: list[InstanceRecord], kept: int, now_s: float
    ) -> Iterator[StopInstance]:
        loads = tuple((i.key, i.running + i.waiting) for i in active)
        view = ScalingView(kept, loads, 0, len(model.instances) - len(active), False, 1.0, False)
        for key in decide_scaling(view, iter(())).remove:
            reason = because(ReasonCode.SCALE_IN, instances=len(active), wanted=kept)
            yield StopInstance(self._books.loaded[key], reason)
