"""Moving loaded models between devices: Algorithm 1 over all of them, and whether a move pays (Prism, section 6.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prism.core.ids import ModelName
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.settings import ClusterSettings, MigrationTest, Placement
from prism.core.views import InstanceState, PlannedDecision
from prism.policy.placement import Assignment, PlacementModel, mean_pressure, move_pays, place_models
from prism.scheduler.books import Books
from prism.scheduler.crowding import is_pressed, requests_wait_for_memory, use_if_moved
from prism.scheduler.decisions import Room, StartInstance
from prism.scheduler.places import Places
from prism.scheduler.rates import rate_shares
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.relief import GoodputRelief

_MOVES_AT_ONCE_SHARE = 8
"""At most one migration for every so many devices at a time, so that loads do not disturb the whole fleet at once."""

_STAYS_S, _STAYS_ACTIVATIONS = 5.0, 20.0
"""A model stays so long, or so many activation times if that is longer, on a device whose memory is short."""


class Migration:
    """Owns when the fleet is rebalanced next."""

    def __init__(self, books: Books, places: Places) -> None:
        self._books, self._places = books, places
        self._relief = GoodputRelief(books, places) if moves_by_goodput(books.settings) else None
        self.next_s = float("inf")
        self._enabled = books.settings.global_scheduler and books.settings.rebalance_every_s > 0

    def on_time(self, now_s: float) -> Iterable[StartInstance]:
        """Rebalance when that is due."""
        books, every_s = self._books, self._books.settings.rebalance_every_s
        if not (self._enabled and books.loaded and len(books.fleet.devices) > 1):
            self.next_s = float("inf")
        elif self.next_s == float("inf"):
            self.next_s = now_s + every_s
        elif now_s >= self.next_s:
            self.next_s = now_s + every_s
            return self._rebalance(now_s)
        return ()

    def _rebalance(self, now_s: float) -> Iterator[StartInstance]:
        """The moves that relieve strained devices; by KV pressure: those that Algorithm 1 asks for and that pay, the
        highest weighted rate first."""
        moving = sum(i.replaces is not None for i in self._books.loaded.values())
        budget = max(1, len(self._books.fleet.devices) // _MOVES_AT_ONCE_SHARE) - moving
        if self._relief is not None:
            yield from self._relief.moves(now_s, budget)
            return
        rates = {m.name: m.weighted_rate for m in self._books.loaded_models()}  # refreshed a moment ago
        wanted = [(m, a) for m, a in self._assignments(rates) if a.moved and self._move_pays(m, a, rates[m.name])]
        for model, assignment in wanted:
            if budget <= 0:
                return
            if (move := self._move(model, assignment, now_s)) is not None:
                yield move
                budget -= 1

    def _assignments(self, rates: Mapping[ModelName, float]) -> list[tuple[ModelRecord, Assignment]]:
        """Algorithm 1 over the loaded models, whose ``r / s`` are ``rates``, and the devices in service."""
        books = self._books
        models = [m for m in books.loaded_models() if m.coming_or_here]
        wanted = [entry for m in models for entry in _placement_models(m, rates[m.name])]
        devices = [d.spec for d in books.fleet.devices.values() if not d.draining]
        tau = books.settings.tau * mean_pressure(wanted, devices)
        by_name = {m.name: m for m in models}
        return [(by_name[a.model], a) for a in place_models(wanted, devices, tau, books.settings.kvpr)]

    # --- whether it pays ---

    def _move_pays(self, model: ModelRecord, assignment: Assignment, weighted_rate: float) -> bool:
        """Whether the move gains more than it costs. It does not

        1. for a model that nobody uses;
        2. away from devices that are short of neither memory nor time;
        3. when most of what waits there is the model's own queue, which goes along;
        4. to devices that would be as much in use as these are (within ``tau``): its neighbours there wait instead;
        5. to fuller devices: idle models there would have to leave as soon as one of them is asked;
        6. for so little less pressure that the activation is not worth it.
        """
        settings, fleet = self._books.settings, self._books.fleet
        if settings.migration is MigrationTest.PAPER:
            return True
        instance = _staying(model)
        if instance.idle_since_s is not None or weighted_rate <= 0.0:  # 1
            return False
        if not any(is_pressed(fleet, d, settings.pressed_kv_share) for d in instance.shards):  # 2
            return False
        if self._brings_its_queue(instance):  # 3
            return False
        use, use_there = use_if_moved(fleet, instance, assignment.devices)
        if use_there >= (1.0 - settings.tau) * use:  # 4
            return False
        full, full_there = use_if_moved(fleet, instance, assignment.devices, idle_too=True)
        if full_there > full:  # 5
            return False
        current_kvpr = float("inf") if assignment.current_kvpr is None else assignment.current_kvpr
        activation_s = self._books.activation_s(model)
        return move_pays(current_kvpr, assignment.best_kvpr, activation_s, settings.planning_window_s)  # 6

    def _brings_its_queue(self, instance: InstanceRecord) -> bool:
        """Most requests that wait on its device are its own, for a place in its engine and not for memory: they would
        go with it, while what it runs still slows down the device that it leaves."""
        id, fleet = instance.queue_device, self._books.fleet
        waiting = sum(i.waiting for i in fleet.devices[id].instances.values())
        return 2 * instance.waiting > waiting and not requests_wait_for_memory(fleet, id)

    # --- the move ---

    def _move(self, model: ModelRecord, assignment: Assignment, now_s: float) -> StartInstance | None:
        """Load the model on its new devices if there is room without evicting; the old instance leaves afterwards."""
        books, places, devices = self._books, self._places, assignment.devices
        active = model.in_state(InstanceState.READY)
        if len(model.instances) != 1 or not active or now_s < self._stays_until_s(model, active[0]):
            return None
        fits = books.fleet.fits_now(places.shard_of(model, now_s)) & places.open_to(model)
        if not all(fits[books.fleet.index[d]] for d in devices):
            return None
        if not active[0].shards.keys().isdisjoint(devices):
            return None  # both copies of a shard would stand on one device; wait for a plan without overlap
        room = Room.on(devices, (), places.kv_cap_bytes(model, devices, now_s))
        return StartInstance(model, room, self._why(model, active[0], assignment, now_s), active[0].key)

    def _why(self, model: ModelRecord, instance: InstanceRecord, assignment: Assignment, now_s: float) -> Reason:
        use, use_there = use_if_moved(self._books.fleet, instance, assignment.devices)
        return because(
            ReasonCode.MIGRATION,
            source=",".join(instance.devices),
            current_kvpr=_known_or_infeasible(assignment.current_kvpr),
            best_kvpr=assignment.best_kvpr,
            use=use,
            use_there=use_there,
            rate_per_s=model.rate.per_s(now_s),
        )

    def _stays_until_s(self, model: ModelRecord, instance: InstanceRecord) -> float:
        """Loads must pay: an instance stays where it was loaded for a planning window; or, where requests wait for
        memory, for so many activation times that at most a twentieth of its time goes into moving."""
        stays_s = self._books.settings.planning_window_s
        if any(requests_wait_for_memory(self._books.fleet, d) for d in instance.shards):
            stays_s = min(stays_s, max(_STAYS_S, _STAYS_ACTIVATIONS * self._books.activation_s(model)))
        return instance.since_s + stays_s

    # --- prism plan ---

    def explain(self, now_s: float) -> Sequence[PlannedDecision]:
        """What Algorithm 1, or the relief of strained devices, says of every loaded model now, and whether its move
        would be made."""
        if self._relief is not None:
            return self._relief.explain(now_s)
        rates = {m.name: self._books.rates.weighted_rate(m, now_s) for m in self._books.loaded_models()}
        return [self._explain(model, assignment, rates[model.name]) for model, assignment in self._assignments(rates)]

    def _explain(self, model: ModelRecord, assignment: Assignment, weighted_rate: float) -> PlannedDecision:
        here = _staying(model).devices
        if not assignment.devices:
            reason = because(ReasonCode.NO_ROOM, weight_bytes=model.spec.weight_bytes)
            return PlannedDecision(model.name, "stay", here, here, reason)
        pays = assignment.moved and self._move_pays(model, assignment, weighted_rate)
        code = ReasonCode.STAY
        if assignment.moved:
            code = ReasonCode.MIGRATION if pays else ReasonCode.MOVE_DOES_NOT_PAY
        reason = because(
            code,
            current_kvpr=_known_or_infeasible(assignment.current_kvpr),
            best_kvpr=assignment.best_kvpr,
            weighted_rate=weighted_rate,
            activation_s=self._books.activation_s(model),
        )
        return PlannedDecision(
            model.name, "move" if pays else "stay", here, assignment.devices if pays else here, reason
        )


def moves_by_goodput(settings: ClusterSettings) -> bool:
    """Whether moves are chosen by goodput; the paper's test goes with Algorithm 1."""
    return settings.placement is Placement.GOODPUT and settings.migration is MigrationTest.COST_AWARE


def _known_or_infeasible(kvpr: float | None) -> float | str:
    return "infeasible" if kvpr is None else kvpr


def _staying(model: ModelRecord) -> InstanceRecord:
    """The first instance that does not drain."""
    return next(i for i in model.instances if i.state is not InstanceState.DRAINING)


def _placement_models(model: ModelRecord, weighted_rate: float) -> list[PlacementModel]:
    """One entry for each instance that stays; only a model's sole, serving instance of one part can be moved."""
    tp, movable = model.spec.tp, _is_movable(model)
    return [
        PlacementModel(
            name=model.name,
            weighted_rate=rate / tp * tp,  # as the devices have it: by shard
            weight_bytes=model.spec.weight_bytes,
            min_kv_bytes=max(s.min_kv_bytes for s in instance.shards.values()) * tp,
            tp=tp,
            current=instance.devices,
            fixed=not movable,
        )
        for instance, rate in rate_shares(model, weighted_rate)
        if instance.state is not InstanceState.DRAINING
    ]


def _is_movable(model: ModelRecord) -> bool:
    if len(model.instances) != 1 or model.pinned:
        return False
    (instance,) = model.instances
    return instance.state is InstanceState.READY and len(instance.parts) == 1
