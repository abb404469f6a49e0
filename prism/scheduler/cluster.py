"""Prism's global scheduler: activate on demand where KV pressure is least, evict to make room, migrate when it pays
(Prism, section 6.2)."""

from __future__ import annotations

from collections.abc import Iterable

from prism.core.ids import DeviceId
from prism.core.instances import InstanceKey
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.settings import ClusterSettings, MigrationTest
from prism.core.specs import ModelSpec
from prism.core.views import InstanceState
from prism.policy.eviction import choose_evictions
from prism.policy.placement import Assignment, PlacementModel, mean_pressure, move_pays, place
from prism.scheduler import keepalive
from prism.scheduler.base import ClusterScheduler
from prism.scheduler.claims import Claims
from prism.scheduler.fleet import Instance, ModelState
from prism.scheduler.lifecycle import NoRoom, Room
from prism.scheduler.replicas import Replicas
from prism.scheduler.room import RoomFinder, eviction_reasons
from prism.scheduler.victims import Pressing

_MOVES_AT_ONCE_SHARE = 8
"""At most one migration for every so many devices at a time, so that loads do not disturb the whole fleet at once."""

_OWN_SHARE = 0.75
"""Part of its device's weighted rate from which on a model counts as alone there."""


_ACTIVATIONS_AWAY = 10.0
"""An idle model gives way to its neighbours' KV if it stays idle for so many activation times."""

_DRAINS_FOR_S = 0.25
"""A drain may take so long before it is hurried for neighbours that wait for memory: most answers are nearly done."""

_STAYS_S, _STAYS_ACTIVATIONS = 5.0, 20.0
"""A model stays so long, or so many activation times if that is longer, on a device whose memory is short."""


class PrismScheduler(ClusterScheduler):
    """Algorithm 1 for placement and migration, section 2 for eviction."""

    def __init__(self, settings: ClusterSettings, catalog: Iterable[ModelSpec], first_generation: int = 1) -> None:
        super().__init__(settings, catalog, first_generation)
        self._claims = Claims(self.fleet, self.models)
        self._finder = RoomFinder(settings, self.fleet, self.models, self.pool_idle, self._claims)
        self._replicas = Replicas(settings.max_replicas)
        self._next_rebalance_s = float("inf")

    def find_room(self, model: ModelState, now_s: float) -> Room | NoRoom:
        """Free room with the least KVPR, else by eviction as far as the wait justifies, else wait."""
        if self.expected:
            self.refresh_rate(model, now_s)  # before its first request nothing else does
        pressing = self._finder.pressing(model, self.activation_s(model), now_s)
        if self._finder.is_full(model, pressing):
            return self._no_room(model, now_s)
        if (too_large := self._finder.never_fits(model)) is not None:
            return NoRoom(too_large, None)
        free = self._finder.free(model, now_s) if self.settings.global_scheduler else self._next_in_turn(model, now_s)
        if free is not None:
            devices, kvpr = free
            return Room(devices, (), self._kv_cap_bytes(model, devices), (("kvpr", kvpr),))
        evictions = self._finder.by_eviction(model, pressing, now_s)
        if evictions is None:
            self._finder.found_full(model, pressing)
            return self._no_room(model, now_s)
        devices = tuple(e.device for e in evictions)
        kvpr = max(e.kvpr for e in evictions)
        cap_bytes = None if self.settings.elastic_memory else self._least_kv_bytes(model, devices)
        return Room(devices, eviction_reasons(evictions, model, self.models, now_s), cap_bytes, (("kvpr", kvpr),))

    def _no_room(self, model: ModelState, now_s: float) -> NoRoom:
        """Wait on; a model with a claim has its devices within one activation and gets as long again as its bound."""
        claim = self._claims.of(model.name)
        if claim is not None and now_s - claim.since_s < model.spec.max_wait_s:
            devices, claimed_s = ",".join(claim.devices), now_s - claim.since_s
            return NoRoom(waits=because(ReasonCode.CLAIM, waiting=model.waiting, devices=devices, claimed_s=claimed_s))
        waited_s = now_s - model.waiting_since_s if model.waiting else 0.0
        reason = because(ReasonCode.NO_ROOM, waiting=model.waiting, waited_s=waited_s)
        return self.give_up_waiting(model, reason, now_s)

    # Many models that wait for room look at the same devices. Nothing but what is started and stopped for them changes
    # meanwhile, so that who may leave is found once for all of them.

    def _retry(self, now_s: float) -> None:
        self._finder.remember(True)
        super()._retry(now_s)
        self._finder.remember(False)

    def start(
        self, model: ModelState, room: Room, reason: Reason, now_s: float, replaces: InstanceKey | None = None
    ) -> Instance:
        self._finder.forget()
        return super().start(model, room, reason, now_s, replaces)

    def stop(self, instance: Instance, reason: Reason, now_s: float, carry: bool = False) -> None:
        self._finder.forget()
        super().stop(instance, reason, now_s, carry)

    def gone(self, instance: Instance, now_s: float) -> None:
        self._finder.forget()
        super().gone(instance, now_s)

    def still_waiting(self, model: ModelState, now_s: float) -> None:
        """A starving model claims the devices that can be cleared for it."""
        starves = now_s >= model.starves_at_s and self._claims.of(model.name) is None
        if not starves or not self._claims.may_look(model, now_s):
            return
        devices = self._finder.clearable(model, now_s)
        if devices is not None:
            self._claims.make(model.name, devices, now_s)
            self._finder.forget()
            for device in devices:
                self._hasten(device, model, now_s)

    def _hasten(self, device: DeviceId, model: ModelState, now_s: float) -> None:
        """What drains on a device that was claimed is carried over, whoever it was to leave for."""
        for instance in list(self.fleet.devices[device].instances.values()):
            if instance.state is InstanceState.DRAINING and instance.busy:
                reason = because(ReasonCode.STARVATION, for_model=model.name, drains_s=now_s - instance.since_s)
                self.stop(instance, reason, now_s, carry=True)

    def on_time(self, now_s: float) -> None:
        """Claims that have ended, and rebalancing when due."""
        if self._claims:
            self._claims.prune()
        if not self._rebalances or not self.loaded:
            self._next_rebalance_s = float("inf")
        elif self._next_rebalance_s == float("inf"):
            self._next_rebalance_s = now_s + self.settings.rebalance_every_s
        elif now_s >= self._next_rebalance_s:
            self._next_rebalance_s = now_s + self.settings.rebalance_every_s
            self._rebalance(now_s)

    def rests(self, instance: Instance, now_s: float) -> None:
        """A model whose keep-alive is over leaves, with all its instances."""
        model = self.models[instance.model]
        if keepalive.is_over(model):
            for active in model.in_state(InstanceState.ACTIVE):
                self.stop(active, because(ReasonCode.KEEP_ALIVE, idle_s=instance.idle_s), now_s)

    def device_reported(self, device: DeviceId, now_s: float) -> None:
        """Replicas of models that make requests wait, and room for KV where an idle neighbour holds it."""
        instances = list(self.fleet.devices[device].instances.values())
        if self.settings.max_replicas > 1:
            for instance in instances:
                if instance.state is InstanceState.ACTIVE and instance.devices[0] == device:
                    self._scale(self.models[instance.model], now_s)
        if self.fleet.requests_wait_for_memory(device):
            self._free_kv(device, instances, now_s)

    def _scale(self, model: ModelState, now_s: float) -> None:
        """Bring the model one instance nearer to the number it should have."""
        active = model.in_state(InstanceState.ACTIVE)
        wanted = max(self._replicas.wanted(model, now_s), min(model.least_instances, len(active)))
        if wanted > len(active) == len(model.instances):
            self._scale_out(model, active, wanted, now_s)
        elif wanted < len(active) == len(model.instances):
            least = min(active, key=lambda i: (i.running + i.waiting, -i.generation))
            self.stop(least, because(ReasonCode.SCALE_IN, instances=len(active), wanted=wanted), now_s)

    def _scale_out(self, model: ModelState, active: list[Instance], wanted: int, now_s: float) -> None:
        """Only into free room, and only where it is better than where the model is. Beside neighbours in use it should
        rather move away from them: rebalancing gets its chance first."""
        board, index = self.fleet.board, self.fleet.index
        alone = all(i.shard.weighted_rate >= _OWN_SHARE * board.rate[index[d]] for i in active for d in i.devices)
        if not alone and self._replicas.waits_for_s(model.name, now_s) < 2.0 * self.settings.rebalance_every_s:
            return
        free = self._finder.free(model, now_s, len(active) + 1)
        if free is None or now_s < model.retry_at_s:
            return
        devices, kvpr = free
        pressure = board.kvpr()
        here = min(float(pressure[index[d]]) for i in active for d in i.devices)
        if kvpr < here and not any(self.fleet.pressed(d, self.settings.pressed_kv_share) for d in devices):
            waiting = sum(i.waiting for i in active)
            reason = because(ReasonCode.SCALE_OUT, instances=len(active), wanted=wanted, waiting=waiting, kvpr=kvpr)
            self.start(model, Room(devices, (), self._kv_cap_bytes(model, devices)), reason, now_s)

    def _free_kv(self, device: DeviceId, instances: list[Instance], now_s: float) -> None:
        """An idle model leaves when requests of its neighbours wait for KV memory; one per report, so that the next
        report shows whether it was enough. Their KV takes its place at once, so that coming back is harder than going:
        unless nothing can run here at all, it goes only if it is likely to stay idle for many activations."""
        draining = [i for i in instances if i.state is InstanceState.DRAINING]
        for instance in draining:
            self._carry_over(instance, now_s)
        if draining:
            return
        stalled = self.fleet.devices[device].stalled
        found = [
            candidate
            for candidate in self._finder.victims.on(device, Pressing.CAN_WAIT, now_s)
            if stalled or candidate.expected_remaining_s >= _ACTIVATIONS_AWAY * candidate.activation_s
        ]
        chosen = choose_evictions(found, 1, self.settings.eviction)
        for candidate in chosen or ():
            reason = because(ReasonCode.KV_PRESSURE, idle_s=candidate.idle_s, regret=candidate.regret)
            self.stop(self.loaded[InstanceKey(candidate.model, candidate.generation)], reason, now_s)

    def _carry_over(self, instance: Instance, now_s: float) -> None:
        """What a model still runs where it has moved away from, and where others wait for memory, goes on where it has
        moved to, unless memory is short there as well. Answers take seconds, and a page of KV, which many requests
        share, comes back with the last of them."""
        active = self.models[instance.model].in_state(InstanceState.ACTIVE)
        drains_s = now_s - instance.since_s
        if not instance.busy or not active or drains_s < _DRAINS_FOR_S:
            return
        if not any(self.fleet.requests_wait_for_memory(d) for i in active for d in i.devices):
            self.stop(instance, because(ReasonCode.KV_PRESSURE, drains_s=drains_s), now_s, carry=True)

    def next_time_s(self) -> float:
        return self._next_rebalance_s

    @property
    def _rebalances(self) -> bool:
        return self.settings.global_scheduler and self.settings.rebalance_every_s > 0 and len(self.fleet.devices) > 1

    # --- migration ---

    def _rebalance(self, now_s: float) -> None:
        moving = sum(len(m.instances) > 1 for m in self._loaded_models())
        budget = max(1, len(self.fleet.devices) // _MOVES_AT_ONCE_SHARE) - moving
        for model, assignment in self.wanted_moves(now_s):
            if budget <= 0:
                return
            if self._migrate(model, assignment, now_s):
                budget -= 1

    def wanted_moves(self, now_s: float) -> list[tuple[ModelState, Assignment]]:
        """Migrations that Algorithm 1 asks for now and that pay, the highest weighted rate first."""
        return [
            (model, assignment)
            for model, assignment in self.assignments(now_s)
            if assignment.moved and self.move_pays(model, assignment)
        ]

    def assignments(self, now_s: float) -> list[tuple[ModelState, Assignment]]:
        """Algorithm 1 over the loaded models and the devices in service, as things stand."""
        models = [m for m in self._loaded_models() if m.coming_or_here]
        for model in models:
            self.refresh_rate(model, now_s)
        wanted = [entry for m in models for entry in _placement_models(m)]
        devices = [d.spec for d in self.fleet.devices.values() if not d.draining]
        tau = self.settings.tau * mean_pressure(wanted, devices)
        by_name = {m.name: m for m in models}
        return [(by_name[a.model], a) for a in place(wanted, devices, tau, self.settings.kvpr)]

    def _loaded_models(self) -> list[ModelState]:
        return list({i.model: self.models[i.model] for i in self.loaded.values()}.values())

    def move_pays(self, model: ModelState, assignment: Assignment) -> bool:
        """Whether the move gains more than it costs: away from a pressed device where others wait, to one that will be
        less in use than this one is by more than ``tau`` (else its neighbours there wait instead) and not fuller (idle
        models there would have to leave as soon as one of them is asked), with so much less pressure that the
        activation is worth it."""
        if self.settings.migration is MigrationTest.PAPER:
            return True
        instance = next(i for i in model.instances if i.state is not InstanceState.DRAINING)
        if instance.idle_since_s is not None or model.weighted_rate <= 0.0:
            return False
        if not any(self.fleet.pressed(d, self.settings.pressed_kv_share) for d in instance.devices):
            return False
        if self._brings_its_queue(instance):
            return False
        use, use_there = self.fleet.use_if_moved(instance, assignment.devices)
        if use_there >= (1.0 - self.settings.tau) * use:
            return False
        full, full_there = self.fleet.use_if_moved(instance, assignment.devices, idle_too=True)
        if full_there > full:
            return False
        current_kvpr = float("inf") if assignment.current_kvpr is None else assignment.current_kvpr
        window_s = self.settings.planning_window_s
        return move_pays(current_kvpr, assignment.best_kvpr, self.activation_s(model), window_s)

    def _brings_its_queue(self, instance: Instance) -> bool:
        """Most requests that wait on its device are its own, for a place in its engine and not for memory: they would
        go with it, while what it runs still slows down the device that it leaves."""
        id = instance.devices[0]
        waiting = sum(i.waiting for i in self.fleet.devices[id].instances.values())
        return 2 * instance.waiting > waiting and not self.fleet.requests_wait_for_memory(id)

    def _migrate(self, model: ModelState, assignment: Assignment, now_s: float) -> bool:
        """Load the model on its new devices if there is room without evicting; the old instance leaves afterwards."""
        active = model.in_state(InstanceState.ACTIVE)
        if len(model.instances) != 1 or not active or now_s < self._stays_until_s(model, active[0]):
            return False
        shard = self._finder.shard_of(model)
        fits = self.fleet.fits_now(shard) & self._finder.open_to(model)
        if not all(fits[self.fleet.index[d]] for d in assignment.devices):
            return False
        if set(active[0].devices) & set(assignment.devices):
            return False  # both copies of a shard would stand on one device; wait for a plan without overlap
        use, use_there = self.fleet.use_if_moved(active[0], assignment.devices)
        reason = because(
            ReasonCode.MIGRATION,
            source=",".join(active[0].devices),
            current_kvpr=assignment.current_kvpr if assignment.current_kvpr is not None else "infeasible",
            best_kvpr=assignment.best_kvpr,
            use=use,
            use_there=use_there,
            rate_per_s=model.rate.per_s(now_s),
        )
        cap_bytes = self._kv_cap_bytes(model, assignment.devices)
        self.start(model, Room(assignment.devices, (), cap_bytes), reason, now_s, active[0].key)
        return True

    def _stays_until_s(self, model: ModelState, instance: Instance) -> float:
        """Loads must pay: an instance stays where it was loaded for a planning window; or, where requests wait for
        memory, for so many activation times that at most a twentieth of its time goes into moving."""
        stays_s = self.settings.planning_window_s
        if any(self.fleet.requests_wait_for_memory(d) for d in instance.devices):
            stays_s = min(stays_s, max(_STAYS_S, _STAYS_ACTIVATIONS * self.activation_s(model)))
        return instance.since_s + stays_s

    # --- ablations ---

    def _next_in_turn(self, model: ModelState, now_s: float) -> tuple[tuple[DeviceId, ...], float] | None:
        """Without the global scheduler: the next devices in turn with room."""
        shard, fleet = self._finder.shard_of(model), self.fleet
        allowed = fleet.fits_now(shard) & self._finder.allowed(model, now_s)
        count = len(allowed)
        turn = fleet.index.get(self.last_devices[-1], -1) + 1 if self.last_devices else 0
        domains = [
            sorted((int(i) for i in d if allowed[i]), key=lambda i: (i - turn) % count) for d in fleet.board.domains
        ]
        enough = [d[: model.spec.tp] for d in domains if len(d) >= model.spec.tp]
        if not enough:
            return None
        chosen = min(enough, key=lambda d: (d[0] - turn) % count)
        return tuple(fleet.board.specs[i].id for i in chosen), 0.0

    def _kv_cap_bytes(self, model: ModelState, devices: tuple[DeviceId, ...]) -> int | None:
        """Without elastic memory: a fixed share, half of what is left on the devices, at least the least KV."""
        if self.settings.elastic_memory:
            return None
        room = self.fleet.room()
        left = min(int(room[self.fleet.index[d]]) for d in devices) - model.spec.shard_weight_bytes
        return max(left // 2, self._least_kv_bytes(model, devices))

    def _least_kv_bytes(self, model: ModelState, devices: tuple[DeviceId, ...]) -> int:
        """Of one shard, in the whole pages that an account gives."""
        board, index, shard = self.fleet.board, self.fleet.index, self._finder.shard_of(model)
        return max(board.kv_bytes(index[d], shard) for d in devices)


def _placement_models(model: ModelState) -> list[PlacementModel]:
    """One entry for each instance that stays; only a model's sole, serving instance can be moved."""
    staying = [i for i in model.instances if i.state is not InstanceState.DRAINING]
    movable = len(model.instances) == 1 and staying[0].state is InstanceState.ACTIVE and not model.pinned
    return [
        PlacementModel(
            name=model.name,
            weighted_rate=instance.shard.weighted_rate * model.spec.tp,
            weight_bytes=model.spec.weight_bytes,
            min_kv_bytes=instance.shard.min_kv_bytes * model.spec.tp,
            tp=model.spec.tp,
            current=instance.devices,
            fixed=not movable,
        )
        for instance in staying
    ]
