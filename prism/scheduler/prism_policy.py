"""Prism's policy: activate on demand where KV pressure is least, evict to make room, migrate when it pays (Prism,
section 6.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from prism.core.events import DeviceReport
from prism.core.reasons import ReasonCode, because
from prism.core.views import InstanceState, PlannedDecision
from prism.scheduler import keepalive
from prism.scheduler.books import Books
from prism.scheduler.claims import Claims
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import Decision, NoRoom, Room, StopInstance, wait_or_refuse
from prism.scheduler.evictions import Evictions
from prism.scheduler.kv_relief import KvRelief
from prism.scheduler.migration import Migration
from prism.scheduler.places import Places
from prism.scheduler.prewarming import Prewarming
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.scaling import Scaling
from prism.scheduler.survey import Size, Survey
from prism.scheduler.triage import Triage
from prism.scheduler.victims import Pressing


class PrismPolicy(ClusterPolicy):
    """Algorithm 1 for placement and migration, section 2 for eviction. Owns the claims, what scaling remembers of loads
    and the time of the next rebalancing."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._claims = Claims(books)
        self._places = Places(books, self._claims)
        self._evictions = Evictions(books, self._places)
        self._migration = Migration(books, self._places)
        self._scaling = Scaling(books, self._places)
        self._prewarming = Prewarming(books, self._places, self._evictions, self.prewarmed)
        self._kv_relief = KvRelief(books)
        self._triage = Triage(books)

    # --- where a wanted model goes ---

    def find_room(self, model: ModelRecord, now_s: float, survey: Survey) -> Room | NoRoom:
        """Where ``model`` is activated.

        1. A model of its size has just found no room: as 6.
        2. It does not fit on empty devices: refused for good.
        3. It is turned away while the fleet cannot serve everybody: until its turn it drives out only who is idle for
           long, and nobody if it would be late all the same.
        4. Free room with the least KVPR (the next in turn without the global scheduler).
        5. Room by the cheapest eviction, as far as its wait justifies (:func:`pressing_of`).
        6. Nothing: it waits, for the devices that it has claimed if it has; beyond its bound it is refused.
        """
        pressing = pressing_of(model, self.books.activation_s(model), now_s)
        if waits_its_turn := self._triage.waits_its_turn(model, now_s):
            pressing = Pressing.CAN_WAIT
        size = self._size(model, pressing)
        if size is not None and size in survey.full:  # 1
            return self._no_room(model, now_s)
        if (too_large := self._places.never_fits(model, now_s)) is not None:  # 2
            return NoRoom(too_large, None)
        if waits_its_turn and not self._triage.could_be_in_time(model):  # 3
            return self._no_room(model, now_s)
        if (free := self._free_room(model, now_s)) is not None:  # 4
            return free
        if (cleared := self._room_by_eviction(model, pressing, now_s, survey)) is not None:  # 5
            return cleared
        if size is not None:
            survey.full.add(size)
        return self._no_room(model, now_s)  # 6

    def _free_room(self, model: ModelRecord, now_s: float) -> Room | None:
        places = self._places
        find = places.find_free if self.books.settings.global_scheduler else places.next_in_turn
        if (free := find(model, now_s)) is None:
            return None
        devices, kvpr = free
        return Room.on(devices, (), places.kv_cap_bytes(model, devices, now_s), (("kvpr", kvpr),))

    def _room_by_eviction(self, model: ModelRecord, pressing: Pressing, now_s: float, survey: Survey) -> Room | None:
        evictions = self._evictions.find_cheapest(model, pressing, now_s, survey)
        if evictions is None:
            return None
        devices = tuple(e.device for e in evictions)
        elastic = self.books.settings.elastic_memory
        cap_bytes = None if elastic else self._places.least_kv_bytes(model, devices, now_s)
        kvpr = max(e.kvpr for e in evictions)
        return Room.on(devices, self._evictions.reasons(evictions, model, now_s), cap_bytes, (("kvpr", kvpr),))

    def _no_room(self, model: ModelRecord, now_s: float) -> NoRoom:
        """Wait on; a model with a claim has its devices within one activation and gets as long again as its bound."""
        claim = self._claims.claim_of(model.name)
        if claim is not None and now_s - claim.since_s < model.spec.max_wait_s:
            devices, claimed_s = ",".join(claim.devices), now_s - claim.since_s
            return NoRoom(waits=because(ReasonCode.CLAIM, waiting=model.waiting, devices=devices, claimed_s=claimed_s))
        waited_s = now_s - model.waiting_since_s if model.waiting else 0.0
        reason = because(ReasonCode.NO_ROOM, waiting=model.waiting, waited_s=waited_s)
        return wait_or_refuse(model, reason, self.books.activation_s(model), now_s)

    def _size(self, model: ModelRecord, pressing: Pressing) -> Size | None:
        """What decides whether there is room; None for a model with instances, failures or a claim of its own, or with
        devices that it was asked to use."""
        if model.instances or model.avoid_until_s or model.short_bytes or model.wanted_devices:
            return None
        if self._claims and self._claims.claim_of(model.name) is not None:
            return None
        spec = model.spec
        return pressing, spec.tp, spec.shard_weight_bytes, self.books.shard_kv_bytes(spec)

    def on_no_room(self, model: ModelRecord, now_s: float) -> Iterator[StopInstance]:
        """A starving model claims the devices that can be cleared for it. What drains there is carried over, whoever it
        was to leave for."""
        starves = now_s >= model.starves_at_s and self._claims.claim_of(model.name) is None
        if self._triage.waits_its_turn(model, now_s):
            return
        if not starves or not self._claims.begin_look(model, now_s):
            return
        devices = self._evictions.clearable_devices(model, now_s)
        if devices is None:
            return
        self._claims.claim_devices(model.name, devices, now_s)
        for device in devices:
            for instance in list(self.books.fleet.devices[device].instances.values()):
                if instance.state is InstanceState.DRAINING and instance.busy:
                    drains_s = now_s - instance.since_s
                    reason = because(ReasonCode.STARVATION, for_model=model.name, drains_s=drains_s)
                    yield StopInstance(instance, reason, carry=True)

    # --- what is done when time passes ---

    def on_time(self, now_s: float) -> Iterable[Decision]:
        """Claims that have ended are dropped; when that is due the loaded models are rebalanced, and instances for
        bursts to come are made."""
        if self._claims:
            self._claims.drop_ended()
        due = now_s >= self._migration.next_s
        if due:
            self.books.times.refresh(now_s)
        moves = self._migration.on_time(now_s)
        if not due and min(self._triage.next_s, self._prewarming.next_s) > now_s:
            return moves
        ahead: Iterable[Decision] = chain(self._triage.on_time(now_s), self._prewarming.on_time(now_s))
        if not due or self.books.settings.max_replicas == 1:
            return chain(moves, ahead)
        return chain(moves, ahead, self._scaling.on_time(now_s))

    def next_time_s(self) -> float:
        return self._migration.next_s

    def wake_s(self) -> float:
        return min(self._migration.next_s, self._prewarming.next_s)

    def on_arrivals(self, model: ModelRecord, idle_s: float, now_s: float) -> None:
        self._triage.on_arrivals(model)
        self._prewarming.on_arrivals(model, idle_s, now_s)

    def on_gone(self, models: Iterable[ModelRecord], now_s: float) -> None:
        self._prewarming.on_gone(models, now_s)

    # --- what is done when a device reports ---

    def on_report(self, report: DeviceReport, now_s: float) -> Iterator[Decision]:
        """Keep-alives that are over, replicas of models that make requests wait, and room for KV where an idle
        neighbour holds it; in this order."""
        for load in report.instances:
            instance = self.books.loaded.get(load.key)
            if instance is not None and instance.idle_since_s is not None and instance.queue_device == report.device:
                yield from self._end_keep_alive(instance)
        here = list(self.books.fleet.devices[report.device].instances.values())
        if self.books.settings.max_replicas > 1:
            for instance in here:
                if instance.state is InstanceState.READY and instance.queue_device == report.device:
                    yield from self._scaling.on_report(instance, now_s)
        if report.memory_short_s > 0.0:
            yield from self._kv_relief.on_shortage(report.device, here, now_s)

    def _end_keep_alive(self, idle: InstanceRecord) -> Iterable[StopInstance]:
        """A model whose keep-alive is over leaves, with all its instances."""
        model = self.books.models[idle.model]
        if not keepalive.is_over(model):
            return ()
        reason = because(ReasonCode.KEEP_ALIVE, idle_s=idle.idle_s)
        return [StopInstance(active, reason) for active in model.in_state(InstanceState.READY)]

    # --- prism plan ---

    def explain_loaded(self, now_s: float) -> Sequence[PlannedDecision]:
        loaded = self._migration.explain(now_s) if self.books.fleet.devices else super().explain_loaded(now_s)
        return [*self._scaling.explain(), *loaded]


def pressing_of(model: ModelRecord, activation_s: float, now_s: float) -> Pressing:
    """Late is what would miss its deadline if the load began any later than now."""
    if model.waiting == 0:
        return Pressing.WOULD_BE_LATE if model.want is not None else Pressing.CAN_WAIT
    if now_s >= model.starves_at_s:
        return Pressing.STARVING
    latest_start_s = model.tightest_deadline_s - 2.0 * activation_s
    return Pressing.WOULD_BE_LATE if now_s >= latest_start_s else Pressing.CAN_WAIT
