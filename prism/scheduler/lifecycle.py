"""Life of an instance, common to all policies: promise memory, command, serve, drain, gone. Effects count only once
they are answered::

    start_instance                       finish_activation
        |                                        |
    WAITING --victims gone--> LOADING --> READY --stop_instance--> DRAINING --remove_instance--> gone
        |                                  |                                       ^
        +-- stop_instance: gone at once    +------------- stop_instance -----------+
"""

from __future__ import annotations

from typing import Final

from prism.core.effects import Activate, Deactivate, Route
from prism.core.events import ActivationFinished, InstanceFound
from prism.core.ids import Generation
from prism.core.instances import InstanceKey
from prism.core.reasons import Reason, ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.views import InstanceState
from prism.policy.eviction import recovered_trust, trust_after
from prism.scheduler.books import Books
from prism.scheduler.decisions import Room, StartInstance
from prism.scheduler.outbox import EffectOutbox
from prism.scheduler.records import InstanceRecord, ModelRecord
from prism.scheduler.shared_waiting import SharedWaiting
from prism.scheduler.shares import shards_of

_DRIVEN_OUT: Final = (ReasonCode.MAKE_ROOM, ReasonCode.KV_PRESSURE)
"""Idle, and somebody else's requests needed the memory."""


class Lifecycle:
    """Moves instances through their states and keeps the books of them; nothing here decides. Owns the generations,
    who waits for whom to leave, and whose memory came free."""

    def __init__(self, books: Books, outbox: EffectOutbox, first_generation: int) -> None:
        self._books, self._outbox = books, outbox
        self._next_generation = first_generation
        self.held: dict[InstanceKey, InstanceRecord] = {}
        """Instances that wait for others to leave."""
        self.shares = SharedWaiting(outbox)
        self.freed: list[ModelRecord] = []
        """Models of which an instance is gone: memory has come free. :class:`.wanting.Wanting` empties it."""

    def start_instance(self, order: StartInstance, now_s: float) -> InstanceRecord:
        """Promise the memory; send the command now or when those that must leave have left."""
        model, room = order.model, order.room
        key = InstanceKey(model.name, Generation(self._next_generation))
        instance = self._new_record(key, model, room, InstanceState.WAITING, order.reason, now_s)
        instance.replaces, instance.live = order.replaces, order.live or self._usual_mode(model)
        if order.reason.code is not ReasonCode.PREWARM:  # that nobody has asked for
            _note_return(model, now_s)
        self._next_generation += 1
        self._books.last_devices = room.devices
        self._enter_books(model, instance, now_s)
        for victim, why in room.evict:
            instance.waits_for.add(victim.key)
            self.stop_instance(victim, why, now_s, carry=victim.busy)
        if order.follows in self._books.loaded:
            instance.waits_for.add(order.follows)
        if instance.waits_for:
            self.held[instance.key] = instance
            for device in room.devices:
                self._books.fleet.devices[device].contested_s = now_s
        self._send_if_ready(instance, now_s)
        return instance

    def _usual_mode(self, model: ModelRecord) -> LiveMode:
        """How an instance begins that nobody chose a way for."""
        live = self._books.live_mode(model)
        if live is not LiveMode.AUTO:
            return live
        several = model.least_instances > 1 and not model.in_state(InstanceState.READY)
        return LiveMode.PIPELINES if several and not self._books.whole_only(model) else LiveMode.WHOLE

    def adopt_instance(self, model: ModelRecord, found: InstanceFound, now_s: float) -> None:
        """Take over an instance that an earlier scheduler has started."""
        key, room = found.key, Room(found.parts)
        state = InstanceState.LOADING if found.loading else InstanceState.READY
        instance = self._new_record(key, model, room, state, because(ReasonCode.DEMAND), now_s)
        instance.served = not found.loading
        self._next_generation = max(self._next_generation, key.generation + 1)
        self._enter_books(model, instance, now_s)
        if not found.loading:
            self.publish_route(model)

    def _new_record(
        self, key: InstanceKey, model: ModelRecord, room: Room, state: InstanceState, reason: Reason, now_s: float
    ) -> InstanceRecord:
        min_kv_tokens = self._books.settings.min_kv_tokens
        return InstanceRecord(
            key,
            room.parts,
            shards_of(room.parts, model.spec, min_kv_tokens, room.kv_cap_bytes),
            state,
            since_s=now_s,
            reason=reason,
            kv_cap_bytes=room.kv_cap_bytes,
        )

    def _enter_books(self, model: ModelRecord, instance: InstanceRecord, now_s: float) -> None:
        rate_per_s = self._books.rates.weighted_rate(model, now_s) * model.spec.slo_ttft_s
        self._books.times.on_start(model, instance, rate_per_s, now_s)
        model.instances.append(instance)
        if len(model.instances) > 1:
            self._books.several.add(model.name)
        self._books.loaded[instance.key] = instance
        self._books.fleet.charge_instance(instance)
        self._books.rates.on_start(model, now_s)

    def _send_if_ready(self, instance: InstanceRecord, now_s: float) -> None:
        if instance.state is InstanceState.WAITING and not instance.waits_for:
            instance.enter(InstanceState.LOADING, now_s)
            self.held.pop(instance.key, None)
            activate = Activate(instance.key, instance.parts, instance.reason, instance.kv_cap_bytes, instance.live)
            self._outbox.emit(activate)

    def finish_activation(self, event: ActivationFinished, now_s: float) -> InstanceRecord | None:
        """The instance serves; the one that it replaces leaves, with its running requests if somebody waits for its
        place. None for an instance that was told to leave in the meantime."""
        instance = self._books.loaded.get(event.key)
        if instance is None or instance.state is not InstanceState.LOADING:
            return None
        model = self._books.models[instance.model]
        if event.early and instance.live is LiveMode.PIPELINES:
            pass  # it waited for those that came with it, which says nothing of one that comes by itself
        elif event.early:
            model.early_s = _smoothed(model.early_s, event.seconds)
        else:
            model.activation_s = _smoothed(model.activation_s, event.seconds)
        model.whole_only = event.whole_only or model.whole_only
        self.begin_serving(model, instance, now_s, event.early)
        return instance

    def begin_serving(self, model: ModelRecord, instance: InstanceRecord, now_s: float, early: bool = False) -> None:
        """It was loading. ``early``: some of its weights are still to come."""
        instance.enter(InstanceState.READY, now_s)
        old = self._books.loaded.get(instance.replaces) if instance.replaces is not None else None
        instance.replaces = None
        if old is not None and old.state is InstanceState.READY:
            awaited = old.busy and any(old.key in held.waits_for for held in self.held.values())
            self.stop_instance(old, because(ReasonCode.MIGRATED, to=",".join(instance.devices)), now_s, carry=awaited)
        else:
            self._books.rates.share_out(model)
            self.publish_route(model)
            self.shares.on_serving(model, early)

    def stop_instance(self, instance: InstanceRecord, reason: Reason, now_s: float, carry: bool = False) -> None:
        """Let the instance leave. One that drains already is only hurried (``carry``)."""
        if instance.state is InstanceState.WAITING:
            self.remove_instance(instance, now_s)
            return
        if instance.state is InstanceState.DRAINING and (instance.carried or not carry):
            return
        model = self._books.models[instance.model]
        was_active = instance.state is InstanceState.READY
        if reason.code in _DRIVEN_OUT and len(model.instances) == 1:
            idle_s = 0.0 if instance.idle_since_s is None else now_s - instance.idle_since_s
            model.driven_out_s, model.away_expected_s = now_s, self._books.idle_left_s(model, idle_s)
        if len(model.instances) == 1:
            model.made_room = reason.code in _DRIVEN_OUT
        if instance.state is not InstanceState.DRAINING:
            instance.enter(InstanceState.DRAINING, now_s)
            self._books.fleet.mark_busy(instance)
            self._books.rates.share_out(model)
        instance.carried = carry
        if was_active:
            self.publish_route(model)
        self._outbox.emit(Deactivate(instance.key, instance.parts, carry, reason))

    def publish_route(self, model: ModelRecord) -> None:
        """Say where the model's requests go."""
        devices = tuple(i.queue_device for i in model.in_state(InstanceState.READY))
        self._outbox.emit(Route(model.name, devices))

    def remove_instance(self, instance: InstanceRecord, now_s: float) -> None:
        """Nothing of the instance is left: free its promise and send those that waited for it."""
        books, model = self._books, self._books.models[instance.model]
        model.instances.remove(instance)
        if len(model.instances) < 2:
            books.several.discard(model.name)
        self.shares.forget(instance)
        del books.loaded[instance.key]
        self.held.pop(instance.key, None)
        books.fleet.release_instance(instance)
        books.rates.share_out(model)
        if instance.state is InstanceState.READY:
            self.publish_route(model)
        if model.removed and not model.instances:
            del books.models[model.name]
        for id in instance.shards:
            if (device := books.fleet.devices.get(id)) is not None:
                for other in list(device.instances.values()):
                    other.waits_for.discard(instance.key)
                    self._send_if_ready(other, now_s)
        self.freed.append(model)
        if instance.replaces is not None:
            self._drop_followers(instance.replaces, now_s)

    def _drop_followers(self, key: InstanceKey, now_s: float) -> None:
        """What was to take this one's place is gone: who waits for it to leave waits in vain."""
        stays = self._books.loaded.get(key)
        if stays is not None and stays.state is InstanceState.READY:
            for held in [held for held in self.held.values() if key in held.waits_for]:
                self.remove_instance(held, now_s)


def _smoothed(known_s: float | None, seen_s: float) -> float:
    return seen_s if known_s is None else 0.7 * known_s + 0.3 * seen_s


def _note_return(model: ModelRecord, now_s: float) -> None:
    """An instance of the model is started: if it was driven out, that shows how long it could do without."""
    if model.driven_out_s is not None:
        trust = recovered_trust(model.idle_trust, now_s - model.trusted_s)
        model.idle_trust = trust_after(trust, model.away_expected_s, now_s - model.driven_out_s)
        model.driven_out_s, model.trusted_s = None, now_s
