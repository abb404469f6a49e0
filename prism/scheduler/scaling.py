"""More or fewer instances of one model: how many, and where.

:func:`decide_scaling` is the rule: a view in, a decision out, which may name any number of instances. Today's rule adds
and removes one at a time; :data:`AT_ONCE` and :func:`decide_scaling` are all that changes for several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.crowding import is_pressed
from prism.scheduler.decisions import Decision, Room, StartInstance, StopInstance
from prism.scheduler.places import Places
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.replica_load import ReplicaLoad

AT_ONCE = 1
"""Most instances of a model that one decision adds or removes."""
_OWN_SHARE = 0.75
"""Part of its device's weighted rate from which on a model counts as alone there."""
_PATIENCE_REBALANCINGS = 2.0
"""Beside neighbours in use a model waits for so many rebalancings: it should rather move away from them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one further instance would stand, in free room."""

    devices: tuple[DeviceId, ...]
    kvpr: float
    """With the instance there."""
    pressed: bool
    """Short of memory or time already."""


@dataclass(frozen=True, slots=True)
class ScalingView:
    """One model whose load was reported, at one moment."""

    wanted: int
    """Instances that its load, or an operator, asks for."""
    active: tuple[tuple[InstanceKey, int], ...]
    """Those that serve, with their requests."""
    settled: bool
    """No instance of it comes or leaves."""
    may_grow: bool
    """It is alone on its devices or has waited long enough beside its neighbours, and no failure holds it back."""
    kvpr: float
    """The least pressure among the devices it has."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What to add and to remove, each instance by name; nothing at all most of the time."""

    add: tuple[Place, ...] = ()
    """One instance on each."""
    remove: tuple[InstanceKey, ...] = ()


def decide_scaling(view: ScalingView, places: Iterator[Place]) -> ScalingDecision:
    """How many instances come or go, and where. ``places``: the best one for a further instance, then for one more
    beside it, and so on.

    1. While an instance comes or leaves: nothing; its load is not known yet.
    2. Fewer than wanted: further ones, if it may grow, as long as the next place is better than what the model has and
       not short of anything itself.
    3. More than wanted: the least loaded leave, of equal ones the youngest.
    """
    have = len(view.active)
    if not view.settled:  # 1
        return ScalingDecision()
    if view.wanted > have:  # 2
        add: list[Place] = []
        while view.may_grow and len(add) < min(AT_ONCE, view.wanted - have):
            place = next(places, None)
            if place is None or place.kvpr >= view.kvpr or place.pressed:
                break
            add.append(place)
        return ScalingDecision(add=tuple(add))
    by_load = sorted(view.active, key=lambda one: (one[1], -one[0].generation))
    return ScalingDecision(remove=tuple(key for key, _ in by_load[: min(AT_ONCE, have - view.wanted)]))  # 3


class Scaling:
    """Makes views of the books, and orders of decisions. Owns what is remembered of loads."""

    def __init__(self, books: Books, places: Places) -> None:
        self._books, self._places = books, places
        self._load = ReplicaLoad(books.settings.max_replicas)

    def on_report(self, model: ModelRecord, now_s: float) -> Iterable[Decision]:
        """The load of an instance of the model was reported."""
        active = model.in_state(InstanceState.READY)
        wanted = max(self._load.observe(model, now_s), min(model.least_instances, len(active)))
        return self._scale(model, active, wanted, now_s) if wanted != len(active) else ()

    def _scale(self, model: ModelRecord, active: list[InstanceRecord], wanted: int, now_s: float) -> Iterator[Decision]:
        view = self._view(model, active, wanted, now_s)
        decision = decide_scaling(view, self._further_places(model, len(active), now_s))
        for place in decision.add:
            room = Room.on(place.devices, (), self._places.kv_cap_bytes(model, place.devices, now_s))
            counts = {"instances": len(active), "wanted": wanted, "waiting": sum(i.waiting for i in active)}
            yield StartInstance(model, room, because(ReasonCode.SCALE_OUT, **counts, kvpr=place.kvpr))
        for key in decision.remove:
            reason = because(ReasonCode.SCALE_IN, instances=len(active), wanted=wanted)
            yield StopInstance(self._books.loaded[key], reason)

    def _view(self, model: ModelRecord, active: list[InstanceRecord], wanted: int, now_s: float) -> ScalingView:
        board, index, settings = self._books.fleet.board, self._books.fleet.index, self._books.settings
        shards = [(index[d], shard) for i in active for d, shard in i.shards.items()]
        alone = all(shard.weighted_rate >= _OWN_SHARE * board.rate[at] for at, shard in shards)
        patience_s = _PATIENCE_REBALANCINGS * settings.rebalance_every_s
        ripe = alone or self._load.waits_for_s(model.name, now_s) >= patience_s
        pressure = board.kvpr()
        return ScalingView(
            wanted=wanted,
            active=tuple((i.key, i.running + i.waiting) for i in active),
            settled=len(active) == len(model.instances),
            may_grow=ripe and now_s >= model.retry_at_s,
            kvpr=min(float(pressure[at]) for at, _ in shards),
        )

    def _further_places(self, model: ModelRecord, have: int, now_s: float) -> Iterator[Place]:
        """Places in free room, each on devices of its own, looked for one by one."""
        fleet, settings = self._books.fleet, self._books.settings
        taken: list[DeviceId] = []
        while found := self._places.find_free(model, now_s, have + 1, taken):
            devices, kvpr = found
            yield Place(devices, kvpr, any(is_pressed(fleet, d, settings.pressed_kv_share) for d in devices))
            taken += devices
            have += 1
